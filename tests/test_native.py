"""The compiled kernels against float64 references, in the machine's own instructions and in generic ones."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvatlas.attention import bounds, native
from kvatlas.attention.native import build, choose, small
from kvatlas.strategy.read import speculation
from kvatlas.strategy.view import LayerFacts, View

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels here: {native.why()}")
LENGTHS = (0, 1, 7, 16, 17, 1000, 1025)
DTYPES = (torch.float32, torch.bfloat16)
generic = functools.cache(lambda: build.load("x86-64-v3"))


@pytest.fixture(params=["native", "generic"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with the library for this machine and with the one for any CPU with AVX2."""
    if request.param == "generic":
        assert not generic().why
        monkeypatch.setattr(build, "built", generic)
        assert native.isa() == "generic"
    return str(request.param)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def attend(q: Tensor, k: Tensor, v: Tensor, number: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and weights in float64; the first `number` [B, H] keys count."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("bhd,bhnd->bhn", q.double(), k) * scale
    past = torch.arange(k.shape[2]) >= number.repeat_interleave(group, 1)[..., None]
    scores = scores.masked_fill(past, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    return torch.einsum("bhn,bhnd->bhd", weights, v), scores.logsumexp(-1), weights


def check(got: tuple[Tensor, Tensor, Tensor | None], expected: tuple[Tensor, Tensor, Tensor]) -> None:
    out, lse, weights = got
    tolerance = 1e-5 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-5, rtol=1e-6)
    if weights is not None:
        width = weights.shape[2]
        torch.testing.assert_close(weights.double(), expected[2][..., :width], atol=1e-6, rtol=1e-5)


def random_case(group: int, dim: int, lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q [B, 2 G, D], k and v [B, 2, capacity, D] with other strides than their shapes', lengths [B, 2]."""
    torch.manual_seed(group * 1000 + dim)
    batch, capacity = len(lengths), max(lengths) + 3
    q = torch.randn(batch, 2 * group, dim).to(dtype)
    k = torch.randn(batch, capacity, 2, dim).to(dtype).transpose(1, 2)
    v = torch.randn(batch, 2, capacity + 1, dim).to(dtype)[:, :, 1:]
    return q, k, v, torch.tensor([(n, (n + 1) // 2) for n in lengths])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "dim"), [(g, d) for g in (1, 3, 4, 7, 8) for d in (64, 80, 128)] + [(17, 8), (2, 96), (5, 256), (6, 48)]
)
def test_decode(group: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v, lengths = random_case(group, dim, LENGTHS, dtype)
    scale = dim**-0.5
    expected = attend(q, k, v, lengths, scale)
    check(native.decode_attend(q, k, v, lengths, scale, probs=True), expected)
    check(native.decode_attend(q, k, v, lengths, scale), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_past_the_length_are_never_read(dtype: torch.dtype, threads: int) -> None:
    q, k, v, lengths = random_case(3, 80, LENGTHS, dtype)
    expected = attend(q, k, v, lengths, 0.1)
    past = (torch.arange(k.shape[2]) >= lengths[..., None])[..., None]
    k, v = k.masked_fill(past, torch.nan), v.masked_fill(past, torch.nan)
    check(native.decode_attend(q, k, v, lengths, 0.1, probs=True, width=1027), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_key_is_not_hidden(dtype: torch.dtype) -> None:
    q, k, v, lengths = random_case(2, 64, (100, 100), dtype)
    k[0, 0, 50] = torch.nan
    out, _, _ = native.decode_attend(q, k, v, lengths, 0.1)
    assert out[0, :2].isnan().all() and not out[1].isnan().any()


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_scores_of_any_size(spread: float) -> None:
    q, k, v, lengths = random_case(3, 64, (1025, 700), torch.float32)
    q = q * spread
    out, lse, weights = native.decode_attend(q, k, v, lengths, 1.0, probs=True)
    expected = attend(q, k, v, lengths, 1.0)
    assert weights is not None
    torch.testing.assert_close(out.double(), expected[0], atol=2e-6 * spread * 10, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(lse), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 7])
def test_index(group: int, dtype: torch.dtype, threads: int) -> None:
    q, k, v, _ = random_case(group, 64, LENGTHS, dtype)
    index = torch.rand(k.shape[:3]).argsort(-1)[..., :900].contiguous()
    count = torch.tensor([(0, 900), (1, 65), (64, 63), (900, 899), (17, 16), (600, 513), (512, 511)])
    rows = index[..., None].expand(-1, -1, -1, 64)
    expected = attend(q, k.gather(2, rows), v.gather(2, rows), count, 0.125)
    index = index.masked_fill(torch.arange(900) >= count[..., None], 2**40)  # padding must not be followed
    check(native.decode_attend(q, k, v, None, 0.125, index=index, count=count, probs=True), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 7, 16, 100])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_paged(block: int, table_dtype: torch.dtype, dtype: torch.dtype, threads: int) -> None:
    q, k, v, lengths = random_case(3, 80, LENGTHS, dtype)
    lengths[:, 1] = lengths[:, 0]
    most = -(-1028 // block)
    table = torch.randperm(most * len(LENGTHS)).view(len(LENGTHS), most)
    pools = []
    for x in (k, v):
        padded = torch.zeros(len(LENGTHS), 2, most * block, 80, dtype=dtype)
        padded[:, :, : x.shape[2]] = x
        pool = torch.empty(most * len(LENGTHS), 2, block, 80, dtype=dtype)
        pool[table] = padded.unflatten(2, (most, block)).transpose(1, 2)
        pools.append(pool)
    expected = attend(q, k, v, lengths, 0.1)
    check(native.decode_attend_paged(q, *pools, table.to(table_dtype), lengths, 0.1, probs=True), expected)
    check(native.decode_attend_paged(q, *pools, table.to(table_dtype), lengths[:, 0], 0.1), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_any_batch_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    q, k, v, lengths = random_case(3, 64, (1025, 17, 1000, 600), dtype)
    results, before = [], torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(native.decode_attend(q, k, v, lengths, 0.125, probs=True, width=1025))
    torch.set_num_threads(before)
    for b in range(4):
        one = (x[b : b + 1].contiguous() for x in (q, k, v, lengths))
        alone = native.decode_attend(*one, 0.125, probs=True, width=1025)
        for first, second, third in zip(*results, alone):
            assert first is not None and second is not None and third is not None
            assert torch.equal(first, second) and torch.equal(first[b : b + 1], third)


def scores_of(q: Tensor, k: Tensor, scale: float, window: int | None, causal: bool) -> Tensor:
    scores = q.double() @ k.double().repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(1, 2) * scale
    ago = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    hidden = (ago < 0) & causal if window is None else ((ago < 0) & causal) | (ago >= window)
    return scores.masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "dim", "first", "window", "causal"),
    [
        (6, 2, 300, 300, 64, 0, None, True),
        (3, 3, 70, 1000, 80, 0, None, True),
        (8, 1, 500, 513, 128, 450, None, True),
        (7, 1, 129, 127, 96, 3, None, True),
        (2, 2, 300, 300, 64, 0, 40, True),
        (2, 2, 300, 301, 64, 17, 200, True),
        (2, 1, 17, 300, 256, 0, None, False),
        (2, 1, 100, 300, 40, 5, 30, False),
        (2, 1, 1, 1, 8, 0, None, True),
        (2, 1, 16, 2049, 64, 16, None, True),
    ],
)
def test_column_mass(
    heads: int, kv_heads: int, queries: int, keys: int, dim: int, first: int, window: int | None, causal: bool,
    dtype: torch.dtype, threads: int,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    q = torch.randn(queries, heads, dim).to(dtype).transpose(0, 1)
    k = torch.randn(kv_heads, keys + 1, dim).to(dtype)[:, :keys]
    scale = dim**-0.5
    lse = scores_of(q, k, scale, None, causal).logsumexp(-1).float()
    rows = (scores_of(q, k, scale, window, causal) - lse.double()[..., None]).exp().nan_to_num(0)
    mass = native.column_mass(q, k, lse, scale, first, window, causal)
    torch.testing.assert_close(mass.double(), rows[:, first:].sum(1), rtol=1e-5, atol=1e-30)


def test_column_mass_of_a_long_prompt_adds_up() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 3000, 64), torch.randn(1, 3000, 64)
    lse = scores_of(q, k, 0.125, None, True).logsumexp(-1).float()
    mass = native.column_mass(q, k, lse, 0.125).double()
    expected = (scores_of(q, k, 0.125, None, True) - lse.double()[..., None]).exp().sum(1)
    torch.testing.assert_close(mass, expected, rtol=1e-5, atol=0)
    assert abs(mass.sum().item() - 3000) < 3000 * 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(960, 576), (576, 1536), (48, 64), (50, 72), (5, 40), (17, 8)])
def test_linear(columns: int, depth: int, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    w = torch.randn(columns, depth).to(dtype) * depth**-0.5
    all_rows = torch.randn(16, depth).to(dtype)
    expected = all_rows.double() @ w.double().T
    tolerance = {"atol": 1e-5, "rtol": 0} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 2**-8}
    together = native.linear_small(all_rows, w)
    torch.testing.assert_close(together.double(), expected, **tolerance)
    for rows in (1, 3, 8):
        out = torch.full((rows, columns), torch.nan, dtype=dtype)
        assert native.linear_small(all_rows[:rows], w, out) is out
        assert torch.equal(out, together[:rows])


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    return done.stdout + done.stderr


def test_no_second_openmp_runtime(library: str) -> None:
    code = f"""
import torch
from kvatlas.attention import bounds, native
from kvatlas.attention.native import build
found = build.load({"native" if library == "native" else "x86-64-v3"!r})
build.built = lambda: found
native.linear_small(torch.ones(2, 64), torch.ones(4096, 64))
maps = {{line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}}
threads = open("/proc/self/status").read().split("Threads:")[1].split()[0]
torch.ones(4096, 4096) @ torch.ones(4096, 64)
again = open("/proc/self/status").read().split("Threads:")[1].split()[0]
print(len(maps), threads == again)
"""
    assert run_python(code).split() == ["1", "True"]


@pytest.mark.parametrize("library", ["native"], indirect=True)
def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "kernel.cpp").write_text('#include <algorithm>\nextern "C" int nothing() { return 0; }')
    code = f"""
from pathlib import Path
from kvatlas.attention.native import build
build.FOLDER = Path({str(tmp_path / "source")!r})
print(build.available(), build.why())
"""
    environment = {**os.environ, "KVATLAS_CACHE": str(tmp_path / "cache")}
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) for _ in range(2)]
    assert [process.communicate()[0].split() for process in both] == [[b"True"], [b"True"]]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


@pytest.mark.parametrize("library", ["native"], indirect=True)
def test_turned_off() -> None:
    code = "from kvatlas.attention import native; print(native.available()); native.note_once(); native.note_once()"
    lines = run_python(code, KVATLAS_NATIVE="0").splitlines()
    assert lines[0] == "False" and len(lines) == 2 and "turned off by KVATLAS_NATIVE=0" in lines[1]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert build.load().library is None and "no C++ compiler" in build.load().why


def test_failed_build_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVATLAS_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", ("-fno-such-flag",))
    assert build.load().library is None and "no-such-flag" in build.load().why and "\n" not in build.load().why
    monkeypatch.setenv("KVATLAS_CACHE", "/proc/nowhere")
    assert build.load().library is None and build.load().why


def test_wrong_tensors_are_refused() -> None:
    q, k = torch.ones(1, 4, 64), torch.ones(1, 2, 10, 64)
    lengths = torch.full((1, 2), 10)
    with pytest.raises(AssertionError):
        native.decode_attend(q.half(), k.half(), k.half(), lengths, 1.0)
    with pytest.raises(AssertionError):
        native.decode_attend(q, k, k, lengths.int(), 1.0)
    with pytest.raises(AssertionError):
        native.decode_attend(q, k.transpose(2, 3).contiguous().transpose(2, 3), k, lengths, 1.0)
    with pytest.raises(AssertionError):
        native.linear_small(torch.ones(17, 64), torch.ones(8, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "n"), [(1, 64), (8, 576), (3, 100)])
def test_rms_norm(dtype: torch.dtype, rows: int, n: int) -> None:
    x, weight = torch.randn(rows, n).to(dtype), torch.randn(n).to(dtype)
    want = torch.nn.functional.rms_norm(x, (n,), None, 1e-5).mul_(weight)
    got = small.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got, want, atol=2e-6 if dtype == torch.float32 else 2e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rope(dtype: torch.dtype) -> None:
    whole = torch.randn(5, 7, 64).to(dtype)
    cos, sin = torch.randn(2, 5, 1, 64).to(dtype)
    qk = whole[:, :6]  # heads beyond it (the values) stay as they are
    want = (qk * cos).add_(qk.roll(32, -1).mul_(sin))
    values = whole[:, 6].clone()
    torch.testing.assert_close(small.rope_(qk, cos, sin), want, atol=2e-6, rtol=0)
    assert torch.equal(whole[:, 6], values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_choose_takes_the_best_and_copy_rows_fetches_them(dtype: torch.dtype) -> None:
    rank, count = torch.rand(2, 3, 333), torch.tensor([[1, 50, 333], [0, 7, 200]])
    index = choose.choose(rank, count, 333)
    for b in range(2):
        for h in range(3):
            n = int(count[b, h])
            assert index[b, h, :n].tolist() == rank[b, h].topk(n).indices.sort().values.tolist()
            assert not index[b, h, n:].any()
    store = torch.randn(2, 3, 400, 24).to(dtype)[:, :, :333]
    fetched = torch.zeros(2, 3, 340, 24, dtype=dtype)
    choose.copy_rows(fetched[:, :, 7:], store, index)
    assert torch.equal(fetched[:, :, 7:], store.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, 24)))
    choose.copy_rows(fetched[:, :, :333], store, None)
    assert torch.equal(fetched[:, :, :333], store)


def test_choose_takes_the_lower_slot_of_a_tie() -> None:
    assert choose.choose(torch.ones(1, 1, 9), torch.tensor([[4]]), 5).tolist() == [[[0, 1, 2, 3, 0]]]


@pytest.mark.parametrize("combine", ["mean", "max", "sum"])
@pytest.mark.parametrize("group", [1, 3])
def test_speculate_is_the_plain_rank(group: int, combine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, keys = torch.randn(2, 3, group, 19) * 2, torch.randn(2, 3, 101, 19)
    lengths, hole = torch.tensor([[101] * 3, [57] * 3]), torch.tensor([[5] * 3, [57] * 3])
    facts = LayerFacts(2, 3, 3 * group, 3, 64, torch.float32, torch.device("cpu"), 0.2)
    view = View(facts, lambda name: keys, lengths, 101, lengths[:, 0], {}, hole=hole)
    rank, near = speculation.speculated_rank(view, part, keys, 1.5, combine)
    monkeypatch.setattr(speculation, "native_serves", lambda x: False)
    want, near_want = speculation.speculated_rank(view, part, keys, 1.5, combine)
    torch.testing.assert_close(rank, want, atol=1e-6, rtol=0)
    assert torch.equal(near, near_want)


def test_choose_on_ranks_of_every_size() -> None:
    big = torch.randn(1, 1, 400) * 10.0 ** torch.randint(-44, 38, (1, 1, 400))
    masked = big.masked_fill(torch.rand(1, 1, 400) < 0.8, -torch.inf)
    few = torch.randint(-2, 3, (1, 1, 400)).float() * torch.tensor([1.0, -1.0]).repeat(200)  # ties, 0 and -0
    for rank in (big, masked, few, torch.full_like(big, -torch.inf)):
        order = rank.sort(dim=-1, descending=True, stable=True).indices[0, 0]
        for n in (1, 2, 57, 399, 400):
            index = choose.choose(rank, torch.tensor([[n]]), 400)
            assert index[0, 0, :n].tolist() == order[:n].sort().values.tolist()
            assert not index[0, 0, n:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("combine", ["mean", "max", "sum"])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 80), (9, 24)])
def test_bounds_are_the_best_score_that_a_page_could_have(
    group: int, dim: int, combine: str, dtype: torch.dtype, threads: int
) -> None:
    q, ends = torch.randn(2, 3, group, dim).to(dtype), torch.randn(2, 3, 515, 2, dim).to(dtype)
    low, high = ends.amin(3), ends.amax(3, keepdim=True).expand(-1, -1, -1, 2, -1)[:, :, :, 1]
    pages = torch.tensor([[515, 0, 17], [256, 257, 1]])
    past = torch.arange(515) >= pages.unsqueeze(-1)
    each = torch.maximum(*(q.double().unsqueeze(3) * x.double().unsqueeze(2) for x in (low, high))).sum(-1)
    want = {"mean": each.mean(2), "max": each.amax(2), "sum": each.sum(2)}[combine].masked_fill(past, -torch.inf)
    assert torch.isfinite(bounds.plain_scores(q, low, high, pages, combine)).equal(~past)
    low = low.masked_fill(past.unsqueeze(-1), torch.nan)  # what does not count is not read
    for got in (bounds.bound_scores(q, low, high, pages, combine), bounds.plain_scores(q, low, high, pages, combine)):
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)
