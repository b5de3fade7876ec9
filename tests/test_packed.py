"""Codes of 4 and 8 bits: made, undone, attended to without being decoded, and kept by a strategy."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from specs import lm_of, prompts
from torch import Tensor

from kvatlas.attention import fast, native
from kvatlas.attention.decode import attend_step, raw_tiles
from kvatlas.attention.native import build
from kvatlas.attention.packed import code_bytes, plain_quantise, quantise, restore, unpack
from kvatlas.attention.prefill import Prefill, attend_prefill
from kvatlas.attention.tiles import TILE, Packed, Tile, Wants
from kvatlas.errors import UserError
from kvatlas.strategy.encode.groups import GroupCodes
from kvatlas.strategy.place.store import Store

BITS, DTYPES, SCALE = (4, 8), (torch.float32, torch.bfloat16), 0.17
GROUPED = [(64, 64), (64, 32), (80, 64), (128, 64), (24, 64), (16, 5), (40, 1), (256, 100)]  # head size, group
generic = functools.cache(lambda: build.load("x86-64-v3"))


@pytest.fixture(params=["plain", "native", "generic"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Plain PyTorch, the kernels for this machine, and those for any CPU with AVX2; two threads."""
    if request.param == "plain":
        monkeypatch.setattr(fast, "serves", lambda q, k: False)
    elif not native.available():
        pytest.skip("the native kernels are not in use here")
    elif request.param == "generic":
        monkeypatch.setattr(build, "built", generic)
    torch.set_num_threads(2)
    yield request.param


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Keys as models make them: some dimensions far larger than the others, and not around zero."""
    return (torch.randn(*shape) * torch.randn(shape[-1]).exp() + torch.randn(shape[-1]) * 3).to(dtype)


def packed_of(k: Tensor, v: Tensor, bits: int, group: int) -> Packed:
    (k_codes, k_scale), (v_codes, v_scale) = (quantise(x, bits, group) for x in (k, v))
    return Packed(k_codes, v_codes, k_scale, v_scale, bits, group, k.shape[-1])


def packed_tile(packed: Packed, **rest: Tensor) -> Tile:
    return Tile(packed.k, packed.v, packed=packed, **rest)


# ------------------------------------------------------------------------- codes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("dim", "group"), [*GROUPED, (7, 64), (33, 8), (64, 1000), (300, 64)])
def test_nothing_is_off_by_more_than_half_a_step(way: str, dim: int, group: int, bits: int, dtype: torch.dtype) -> None:
    x = some(3, 2, 70, dim, dtype=dtype)
    codes, scales = quantise(x, bits, group)
    assert codes.shape == (3, 2, 70, code_bytes(dim, bits)) and code_bytes(dim, 4) == (dim + 1) // 2
    assert scales.shape == (3, 2, 70, -(-dim // group), 2) and scales.dtype == torch.float16
    got = restore(codes, scales, bits, group, dim, torch.float64)
    for first in range(0, dim, group):
        part = x[..., first : first + group].double()
        step = (part.amax(-1) - part.amin(-1)) / (2**bits - 1)
        room = part.abs().amax(-1) * 2.0**-11 + 1e-5  # what float16 does to scale and zero
        off = (got[..., first : first + group] - part).abs().amax(-1)
        assert (off <= step / 2 + room).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("dim", "group"), [*GROUPED, (7, 64), (33, 8)])
def test_every_way_gives_the_same_codes(way: str, dim: int, group: int, bits: int) -> None:
    for x in (some(2, 90, dim), some(2, 90, dim, dtype=torch.bfloat16), some(600, dim) * 1e-6):
        for got, want in zip(quantise(x, bits, group), plain_quantise(x, bits, group)):
            assert torch.equal(got, want)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -300.07, 1e-9, 60000.0, -1e-30])
def test_a_constant_group_is_kept(way: str, value: float, bits: int) -> None:
    x = torch.full((4, 64), value)
    got = restore(*quantise(x, bits, 32), bits, 32, 64, torch.float32)
    torch.testing.assert_close(got, x, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("bits", BITS)
def test_a_broken_value_stays_broken_and_a_huge_one_finite(way: str, bits: int) -> None:
    x = some(3, 64)
    x[0, 40], x[1, 2], x[2, :] = torch.nan, torch.inf, 1e6
    got = restore(*quantise(x, bits, 32), bits, 32, 64, torch.float32)
    assert got.isnan().sum(-1).tolist() == [32, 32, 0] and got[2].isfinite().all()


# ---------------------------------------------------------------------- attention


def step64(q: Tensor, packed: Packed, picks: list[list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """``picks[b][h]`` are the slots attended to; output and weights ``[Hq][n]`` in float64."""
    k, v = unpack(packed, torch.float64)
    out, weights = torch.zeros(q.shape, dtype=torch.float64), []
    for b, row in enumerate(picks):
        for g in range(q.shape[1]):
            h = g // (q.shape[1] // len(row))
            p = (k[b, h, row[h]] @ q[b, g].double() * SCALE).softmax(-1)
            out[b, g] = p @ v[b, h, row[h]]
            weights.append(p)
    return out, weights


def check(got: tuple[Tensor, Tensor | None], want: tuple[Tensor, list[Tensor]], dtype: torch.dtype) -> None:
    close = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 6e-2, "rtol": 3e-2}
    assert got[0].dtype == dtype and got[1] is not None
    torch.testing.assert_close(got[0].double(), want[0], **close)
    for mine, p in zip(got[1].flatten(0, 1), want[1]):
        torch.testing.assert_close(mine[: len(p)].double(), p, **close)
        assert not mine[len(p) :].any(), "padding received weight"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [1, 3, 9])
@pytest.mark.parametrize(("dim", "span"), GROUPED)
def test_step_over_ragged_slots(way: str, dim: int, span: int, group: int, bits: int, dtype: torch.dtype) -> None:
    lengths = torch.tensor([[70, 64], [1, 17], [100, 33]])
    q = torch.randn(3, 2 * group, dim).mul_(dim**-0.5).to(dtype)
    whole = packed_of(some(3, 2, 110, dim, dtype=dtype), some(3, 2, 110, dim, dtype=dtype), bits, span)
    packed = whole.map(lambda x: x[:, :, :100])  # a view of a larger buffer, as stores give
    past = torch.arange(100) >= lengths.unsqueeze(-1)
    packed.k_scale[past], packed.v_scale[past] = torch.nan, torch.nan
    want = step64(q, packed.map(torch.Tensor.clone), [[torch.arange(n) for n in row] for row in lengths.tolist()])
    if way == "plain":  # there a weight of 0 times NaN is NaN: stores hold zeros where nothing is
        packed.k_scale[past], packed.v_scale[past] = 0.0, 0.0
    check(attend_step(q, [packed_tile(packed, lengths=lengths)], scale=SCALE, weights=True), want, dtype)
    assert attend_step(q, [packed_tile(packed, lengths=lengths)], scale=SCALE)[1] is None


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [TILE + 300, TILE, 5])
def test_step_over_more_than_a_tile(way: str, n: int, bits: int) -> None:
    q = torch.randn(2, 6, 64)
    packed = packed_of(some(2, 2, n, 64), some(2, 2, n, 64), bits, 64)
    want = step64(q, packed, [[torch.arange(n)] * 2] * 2)
    check(attend_step(q, [packed_tile(packed)], scale=SCALE, weights=True), want, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [5, TILE + 300])
def test_step_over_a_selection(way: str, width: int, bits: int, dtype: torch.dtype) -> None:
    q = torch.randn(2, 6, 64).mul_(0.2).to(dtype)
    packed = packed_of(some(2, 2, 2000, 64, dtype=dtype), some(2, 2, 2000, 64, dtype=dtype), bits, 64)
    index = torch.stack([torch.randperm(2000)[:width] for _ in range(4)]).view(2, 2, width)
    count = torch.tensor([[width, 3], [1, width - 1]])
    want = step64(q, packed, [[index[b, h, : count[b, h]] for h in range(2)] for b in range(2)])
    got = attend_step(q, [packed_tile(packed, index=index, count=count)], scale=SCALE, weights=True)
    check(got, want, dtype)


@pytest.mark.parametrize("bits", BITS)
def test_the_batch_and_the_threads_do_not_matter(bits: int) -> None:
    if not native.available():
        pytest.skip("plain PyTorch promises this to rounding only")
    q, lengths = torch.randn(4, 6, 64), torch.tensor([1025, 17, 1000, 600]).unsqueeze(1).repeat(1, 2)
    packed = packed_of(some(4, 2, 1025, 64), some(4, 2, 1025, 64), bits, 64)
    step = lambda q, p, n: attend_step(q, [packed_tile(p, lengths=n)], scale=SCALE, weights=True)  # noqa: E731
    alone = step(q, packed, lengths)
    torch.set_num_threads(2)
    both = step(q, packed, lengths)
    assert all(torch.equal(a, b) for a, b in zip(alone, both))
    for b in range(4):
        row = slice(b, b + 1)
        one = step(q[row], packed.map(lambda x, at=row: x[at]), lengths[row])
        assert all(torch.equal(mine[row], theirs) for mine, theirs in zip(both, one))


@pytest.mark.parametrize("bits", BITS)
def test_prefill_over_codes_is_prefill_over_what_they_stand_for(bits: int) -> None:
    past, new = TILE + 40, 15
    q, k, v = torch.randn(6, new, 16), torch.randn(2, new, 16), torch.randn(2, new, 16)
    packed = packed_of(some(1, 2, past, 16), some(1, 2, past, 16), bits, 64)
    run = lambda tile: attend_prefill(q, k, v, Prefill(SCALE), past=[tile], first=past, wants=Wants("mass"))  # noqa: E731
    for got, want in zip(run(packed_tile(packed)), run(Tile(*unpack(packed, torch.float32)))):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert [tile.width for tile in raw_tiles(packed_tile(packed), torch.float32)] == [TILE, 40]


# ------------------------------------------------------------------------ presets


@pytest.mark.parametrize("bits", BITS)
def test_a_slot_takes_the_bytes_of_its_codes(bits: int) -> None:
    encode = GroupCodes(bits, 64, 80, torch.bfloat16)
    columns = encode.columns(80, torch.bfloat16)
    assert sum(c.slot_bytes() for c in columns) == 2 * (80 * bits // 8 + 2 * 2 * 2)  # codes; two groups' scale and zero
    assert all(c.kind == "payload" for c in columns)
    made = encode.encode(torch.randn(2, 5, 80), torch.randn(2, 5, 80), torch.arange(5).expand(2, 5))
    assert {name: (t.shape[2:], t.dtype) for name, t in made.items()} == {c.name: (c.tail, c.dtype) for c in columns}


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("group", [0, -3])
def test_a_group_of_nothing_is_refused(name: str, group: int) -> None:
    with pytest.raises(UserError, match=f"{name}: group must be at least 1 element, not {group}"):
        lm_of("llama").new_cache(f"{name}:group={group}")


@pytest.mark.parametrize("spec", ["int4", "int8:group=5", "h2o:0.3+int4", "oracle:0.3+int4", "streaming:0.3+int4"])
def test_what_stays_keeps_its_codes(spec: str) -> None:
    """Steps, evictions and forks move codes: those of a token that stays are the codes it got when it came."""
    lm = lm_of("llama")
    cache = lm.new_cache(spec)
    token = lm.prefill(cache, prompts(40, 23), 20).argmax(-1)
    held = [_by_position(layer.store, row) for layer in cache.layers for row in (0, 1)]
    for _ in range(6):
        token = lm.step(cache, token).argmax(-1)
    cache.select_rows(torch.tensor([1, 0]))
    after = [_by_position(layer.store, row) for layer in cache.layers for row in (1, 0)]
    for before, now in zip(held, after):
        both = before.keys() & now.keys()
        assert len(both) > 4 and all(torch.equal(before[at], now[at]) for at in both)


def _by_position(store: Store, row: int) -> dict[tuple[int, int], Tensor]:
    """(KV head, position) -> all bytes of its keys and values."""
    store.compact()
    columns = store.row_columns(row)
    codes = torch.cat(
        [columns[n].flatten(2).view(torch.uint8) for n in ("k_codes", "k_scale", "v_codes", "v_scale")], 2
    )
    n = codes.shape[1]
    at = columns["pos"].tolist() if "pos" in columns else [range(n)] * len(codes)
    return {(h, int(at[h][i])): codes[h, i].clone() for h in range(len(codes)) for i in range(n)}


@pytest.mark.parametrize(("spec", "bound"), [("int8", 1e-3), ("int4", 0.2)])
def test_distributions_stay_near_those_of_raw(spec: str, bound: float) -> None:
    lm = lm_of("llama")
    logits = []
    for name in ("full", spec):
        cache = lm.new_cache(name)
        logits.append([lm.prefill(cache, prompts(60, 23), 20)])
        for token in (5, 9, 11, 200):
            logits[-1].append(lm.step(cache, torch.full((2,), token)))
    raw, coded = (torch.stack(x).log_softmax(-1) for x in logits)
    assert torch.equal(raw[0], coded[0]), "a prompt attends to its raw keys"
    kl = (raw.exp() * (raw - coded)).sum(-1)
    assert 0 < kl.mean() < bound
