"""Attention and its statistics against float64, on plain PyTorch and on the native kernels."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from reference import Keys, rope, softmax64, statistic64
from torch import Tensor

from kvatlas.attention.decode import attend_step
from kvatlas.attention.prefill import Prefill, attend_prefill
from kvatlas.attention.tiles import Tile, Wants

HEADS = [(4, 4, 16), (6, 2, 16), (9, 3, 64), (4, 1, 24)]  # query heads, KV heads, head size
SCALE = 0.21
EXACT = {"atol": 1e-5, "rtol": 1e-5}
ROUNDED = {"atol": 3e-2, "rtol": 3e-2}  # bfloat16 keeps 8 bits: scores, weights and outputs are each rounded once
ALL_WANTS = [
    Wants("mass"),
    Wants("window", 9),
    Wants("window"),
    Wants("band", 7),
    Wants("hits", 11),
    Wants("hits", 100, "max"),
]


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).mul_(1.5).to(dtype)


# ------------------------------------------------------------------ one query


def step64(q: Tensor, keys: list[list[Tensor]], values: list[list[Tensor]], sink: Tensor | None) -> tuple[Tensor, list]:
    """Per sequence and query head: ``keys[b][h] [n, D]`` -> output ``[B, Hq, D]`` and weights (ragged)."""
    batch, heads, dim = q.shape
    out, weights = torch.zeros(batch, heads, dim, dtype=torch.float64), []
    for b in range(batch):
        group = heads // len(keys[b])
        for g in range(heads):
            k, v = keys[b][g // group].double(), values[b][g // group].double()
            scores = k @ q[b, g].double() * SCALE
            if sink is not None:
                scores = torch.cat([scores, sink[g : g + 1].double()])
            p = scores.softmax(-1)[: len(k)]
            out[b, g] = p @ v
            weights.append(p)
    return out, weights


def check_step(result: tuple[Tensor, Tensor | None], want: tuple[Tensor, list], close: dict[str, float]) -> None:
    out, weights = result
    torch.testing.assert_close(out.double(), want[0], **close)
    assert weights is not None and weights.dtype == torch.float32
    for got, p in zip(weights.flatten(0, 1), want[1]):
        torch.testing.assert_close(got[: len(p)].double(), p, **close)
        assert not got[len(p) :].any(), "padding received weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_step_over_ragged_slots(kernels: str, heads: tuple[int, int, int], with_sink: bool, dtype: torch.dtype) -> None:
    many, few, dim = heads
    lengths = torch.tensor([37, 1, 20]).unsqueeze(1).repeat(1, few)
    lengths[0, -1] = 11  # KV heads of one sequence may differ too
    q, k, v = rows(3, many, dim, dtype=dtype), rows(3, few, 50, dim, dtype=dtype), rows(3, few, 50, dim, dtype=dtype)
    sink = torch.randn(many) if with_sink else None
    pick = lambda x: [[x[b, h, : lengths[b, h]] for h in range(few)] for b in range(3)]  # noqa: E731
    tile = Tile(k[:, :, :40], v[:, :, :40], lengths)  # a view of a larger buffer, as stores give
    result = attend_step(q, [tile], scale=SCALE, weights=True, sink=sink)
    check_step(result, step64(q, pick(k), pick(v), sink), EXACT if dtype == torch.float32 else ROUNDED)
    assert attend_step(q, [tile], scale=SCALE, sink=sink)[1] is None, "nobody asked for weights"


@pytest.mark.parametrize("heads", HEADS)
def test_step_without_lengths_counts_every_slot(kernels: str, heads: tuple[int, int, int]) -> None:
    many, few, dim = heads
    q, k, v = rows(2, many, dim), rows(2, few, 33, dim), rows(2, few, 33, dim)
    result = attend_step(q, [Tile(k, v)], scale=SCALE, weights=True)
    check_step(result, step64(q, list(k), list(v), None), EXACT)


@pytest.mark.parametrize("width", [5, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_over_a_selection(kernels: str, width: int, dtype: torch.dtype) -> None:
    """Selected slots only, in the order given; more than one gathered tile of them; counts differ by head."""
    slots = 2000
    q, k, v = rows(2, 6, 16, dtype=dtype), rows(2, 2, slots, 16, dtype=dtype), rows(2, 2, slots, 16, dtype=dtype)
    index = torch.stack([torch.randperm(slots)[:width] for _ in range(4)]).view(2, 2, width)
    count = torch.tensor([[width, 3], [1, width - 1]])
    pick = lambda x: [[x[b, h, index[b, h, : count[b, h]]] for h in range(2)] for b in range(2)]  # noqa: E731
    result = attend_step(q, [Tile(k, v, index=index, count=count)], scale=SCALE, weights=True)
    check_step(result, step64(q, pick(k), pick(v), None), EXACT if dtype == torch.float32 else ROUNDED)


@pytest.mark.parametrize("block", [4, 16])
def test_step_over_a_block_table(kernels: str, block: int) -> None:
    """Blocks in any order, shared between sequences, the last one partly filled; 1,500 slots pass a tile's size."""
    lengths = [1500, 37, 5]
    most = -(-lengths[0] // block)
    pool_k, pool_v = rows(2 * most, 2, block, 16), rows(2 * most, 2, block, 16)
    table = torch.stack([torch.randperm(2 * most)[:most] for _ in lengths])
    table[1, :2] = table[0, :2]
    flat = lambda pool, b: pool[table[b]].transpose(0, 1).reshape(2, -1, 16)[:, : lengths[b]]  # noqa: E731
    q = rows(3, 6, 16)
    tile = Tile(pool_k, pool_v, torch.tensor(lengths).unsqueeze(1).expand(3, 2).contiguous(), table=table)
    result = attend_step(q, [tile], scale=SCALE, weights=True)
    want = step64(q, [list(flat(pool_k, b)) for b in range(3)], [list(flat(pool_v, b)) for b in range(3)], None)
    check_step(result, want, EXACT)


def test_step_merges_tiles_seen_from_elsewhere(kernels: str) -> None:
    """A first tile is seen from ``query_at``, the second from the query's own position; sinks count in the softmax."""
    now, inside = torch.tensor([90, 41]), torch.tensor([12, 41])
    raw, sink = rows(2, 4, 16), torch.randn(4)
    k, v = rows(2, 2, 13, 16), rows(2, 2, 13, 16)
    true = rope(raw.unsqueeze(2), now.view(2, 1, 1)).squeeze(2)
    turned = rope(raw.unsqueeze(2), inside.view(2, 1, 1)).squeeze(2)
    turn = lambda q, to: rope(q, (to - now.unsqueeze(1)).unsqueeze(1))  # noqa: E731
    tiles = [Tile(k[:, :, :4], v[:, :, :4], query_at=inside.unsqueeze(1)), Tile(k[:, :, 4:], v[:, :, 4:])]
    out, weights = attend_step(true, tiles, scale=SCALE, weights=True, sink=sink, rotate=turn)
    for b in range(2):
        parts = [
            Keys(q[b].unsqueeze(1), k[b, :, part], v[b, :, part], torch.zeros(2, n, dtype=torch.long))
            for q, part, n in ((turned, slice(0, 4), 4), (true, slice(4, 13), 9))
        ]
        want, p = softmax64(parts, now[b : b + 1], SCALE, sink)
        torch.testing.assert_close(out[b].double(), want[:, 0], **EXACT)
        torch.testing.assert_close(weights[b].double(), p[:, 0], **EXACT)


def test_step_with_an_empty_tile_is_not_disturbed(kernels: str) -> None:
    """A sequence that has nothing in one of the tiles gets no NaN from it."""
    q, k, v = rows(2, 4, 16), rows(2, 2, 8, 16), rows(2, 2, 8, 16)
    lengths = torch.tensor([[8, 8], [0, 0]])
    parts = [Tile(k[:, :, :3], v[:, :, :3]), Tile(k[:, :, 3:], v[:, :, 3:], lengths.clamp(max=5))]
    out, weights = attend_step(q, parts, scale=SCALE, weights=True)
    want = attend_step(q[1:], [Tile(k[1:, :, :3], v[1:, :, :3])], scale=SCALE, weights=True)
    torch.testing.assert_close(out[1:], want[0], **EXACT)
    assert not weights[1, :, 3:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4), **EXACT)


# ----------------------------------------------------------------- many queries


def run64(
    q: Tensor, k: Tensor, v: Tensor, past: list[Keys], first: int, how: Prefill, wants: Wants | None = None
) -> tuple[Tensor, Tensor | None]:
    """What ``attend_prefill`` must return for new tokens at ``first ..`` over ``past``."""
    positions = torch.arange(first, first + q.shape[1])
    parts = [*past, Keys(q, k, v, positions.expand(k.shape[0], -1))]
    out, p = softmax64(parts, positions, how.scale, how.sink, how.window)
    key_at = torch.cat([part.positions for part in parts], 1).repeat_interleave(q.shape[0] // k.shape[0], 0)
    gap = positions.view(1, -1, 1) - key_at.unsqueeze(1)
    return out.transpose(0, 1), None if wants is None else statistic64(p, gap, wants, k.shape[0], first)


def check_run(
    result: tuple[Tensor, Tensor | None], want: tuple[Tensor, Tensor | None], dtype: torch.dtype = torch.float32
) -> None:
    torch.testing.assert_close(result[0].double(), want[0], **(EXACT if dtype == torch.float32 else ROUNDED))
    if want[1] is None:
        assert result[1] is None
        return
    assert result[1] is not None
    if want[1].dtype == torch.uint8:
        assert torch.equal(result[1], want[1])
        return
    assert result[1].dtype == torch.float32
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(result[1].double(), want[1], **close)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("wants", [None, *ALL_WANTS], ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
def test_prefill_and_its_statistics(kernels: str, eager: bool, wants: Wants | None, with_sink: bool) -> None:
    q, k, v = rows(6, 45, 16), rows(2, 45, 16), rows(2, 45, 16)
    how = Prefill(SCALE, sink=torch.randn(6) if with_sink else None, eager=eager)
    check_run(attend_prefill(q, k, v, how, wants=wants), run64(q, k, v, [], 0, how, wants))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2, 600])
def test_prefill_lengths_and_dtypes(kernels: str, heads: tuple[int, int, int], dtype: torch.dtype, length: int) -> None:
    """600 rows pass the tiles of every pass; the mass of all keys is the number of queries."""
    many, few, dim = heads
    shapes = [(n, length, dim) for n in (many, few, few)]
    q, k, v = (rows(*shape, dtype=dtype) for shape in shapes)
    how = Prefill(dim**-0.5)
    result = attend_prefill(q, k, v, how, wants=Wants("mass"))
    check_run(result, run64(q, k, v, [], 0, how, Wants("mass")), dtype)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result[1].sum(-1), torch.full((many,), float(length)), rtol=near, atol=0)


@pytest.mark.parametrize("wants", [None, *ALL_WANTS], ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("pieces", [[20], [7, 13]])
def test_prefill_over_what_is_stored(kernels: str, wants: Wants | None, with_sink: bool, pieces: list[int]) -> None:
    """A chunk over stored tokens gives what the last rows of the whole would; every statistic counts both."""
    first, length = sum(pieces), 15
    q, k, v = rows(6, length, 16), rows(2, first + length, 16), rows(2, first + length, 16)
    how = Prefill(SCALE, sink=torch.randn(6) if with_sink else None)
    tiles = [
        Tile(a.unsqueeze(0), b.unsqueeze(0))
        for a, b in zip(k[:, :first].split(pieces, 1), v[:, :first].split(pieces, 1))
    ]
    past = [Keys(q, k[:, :first], v[:, :first], torch.arange(first).expand(2, -1))]
    result = attend_prefill(q, k[:, first:], v[:, first:], how, past=tiles, first=first, wants=wants)
    check_run(result, run64(q, k[:, first:], v[:, first:], past, first, how, wants))


@pytest.mark.parametrize("wants", ALL_WANTS, ids=str)
def test_prefill_over_what_an_evicting_rule_left(kernels: str, wants: Wants) -> None:
    """Stored keys have gaps between their true positions, other ones for each KV head."""
    first, length, kept = 60, 15, 11
    at = torch.stack([torch.randperm(first)[:kept].sort().values for _ in range(2)])
    q, k, v = rows(6, length, 16), rows(2, length, 16), rows(2, length, 16)
    past_k, past_v = rows(2, kept, 16), rows(2, kept, 16)
    tile = Tile(past_k.unsqueeze(0), past_v.unsqueeze(0), positions=at.int().unsqueeze(0))
    how = Prefill(SCALE)
    want = run64(q, k, v, [Keys(q, past_k, past_v, at)], first, how, wants)
    check_run(attend_prefill(q, k, v, how, past=[tile], first=first, wants=wants), want)


@pytest.mark.parametrize("wants", [None, Wants("mass"), Wants("hits", 7), Wants("band", 9)], ids=str)
def test_prefill_over_blocks(kernels: str, wants: Wants | None) -> None:
    """The last block of the table is partly filled: what lies behind it is neither seen nor counted."""
    first, length, block = 21, 12, 8
    pool_k, pool_v = rows(5, 2, block, 16), rows(5, 2, block, 16)
    table = torch.tensor([[3, 0, 4]])
    tile = Tile(pool_k, pool_v, torch.full((1, 2), first), table=table)
    flat = lambda pool: pool[table[0]].transpose(0, 1).reshape(2, -1, 16)[:, :first]  # noqa: E731
    q, k, v = rows(6, length, 16), rows(2, length, 16), rows(2, length, 16)
    how = Prefill(SCALE)
    past = [Keys(q, flat(pool_k), flat(pool_v), torch.arange(first).expand(2, -1))]
    result = attend_prefill(q, k, v, how, past=[tile], first=first, wants=wants)
    check_run(result, run64(q, k, v, past, first, how, wants))


@pytest.mark.parametrize("wants", [None, Wants("mass"), Wants("hits", 20)], ids=str)
def test_prefill_over_keys_seen_from_elsewhere(kernels: str, wants: Wants | None) -> None:
    """The stored keys are seen from another position than the query's own, in the output and in the statistic."""
    first, length = 20, 15
    at = torch.arange(first, first + length)
    inside = at - 9
    raw, k, v = rows(6, length, 16), rows(2, first + length, 16), rows(2, first + length, 16)
    q, turned = rope(raw, at), rope(raw, inside)
    tiles = [
        Tile(k[None, :, :4], v[None, :, :4], query_at=inside.unsqueeze(0)),
        Tile(k[None, :, 4:first], v[None, :, 4:first]),
    ]
    past = [
        Keys(turned, k[:, :4], v[:, :4], torch.arange(4).expand(2, -1)),
        Keys(q, k[:, 4:first], v[:, 4:first], torch.arange(4, first).expand(2, -1)),
    ]
    how = Prefill(SCALE)
    turn = lambda x, to: rope(x, to.unsqueeze(1) - at)  # noqa: E731
    result = attend_prefill(q, k[:, first:], v[:, first:], how, past=tiles, first=first, wants=wants, rotate=turn)
    check_run(result, run64(q, k[:, first:], v[:, first:], past, first, how, wants))


@pytest.mark.parametrize("window", [1, 5, 30, 270])
@pytest.mark.parametrize("length", [20, 300])
@pytest.mark.parametrize("with_sink", [False, True])
def test_prefill_in_a_layer_with_its_own_window(kernels: str, window: int, length: int, with_sink: bool) -> None:
    """Stored and new tokens alike are seen only inside the model's window; no row may lose itself."""
    first = 10
    at = torch.tensor([[0, 3, 6, 8, 9], [1, 2, 5, 7, 9]])
    q, k, v, past_k, past_v = (
        rows(6, length, 16),
        rows(2, length, 16),
        rows(2, length, 16),
        rows(2, 5, 16),
        rows(2, 5, 16),
    )
    how = Prefill(SCALE, window=window, sink=torch.randn(6) if with_sink else None)
    check_run(attend_prefill(q, k, v, how), run64(q, k, v, [], 0, how))
    tile = Tile(past_k.unsqueeze(0), past_v.unsqueeze(0), positions=at.int().unsqueeze(0))
    want = run64(q, k, v, [Keys(q, past_k, past_v, at)], first, how)
    check_run(attend_prefill(q, k, v, how, past=[tile], first=first), want)


def test_prefill_in_float64_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dtype without a fused operator takes the plain rows; with few scores at once they are many tiles."""
    monkeypatch.setattr("kvatlas.attention.flash.SCORES_AT_ONCE", 500)
    monkeypatch.setattr("kvatlas.attention.mass.SCORES_AT_ONCE", 500)
    q, k, v = (rows(n, 60, 16).double() for n in (6, 2, 2))
    how = Prefill(SCALE)
    out, mass = attend_prefill(q, k, v, how, wants=Wants("mass"))
    want = run64(q, k, v, [], 0, how, Wants("mass"))
    torch.testing.assert_close(out, want[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mass.double(), want[1], atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------------ memory


MEMORY = """
import torch
from pathlib import Path
from kvatlas.attention import fast
from kvatlas.attention.prefill import Prefill, attend_prefill
from kvatlas.attention.tiles import Wants
torch.set_num_threads(2)
if {plain}:
    fast.serves = lambda q, k: False
n = 16384
q, k, v = (torch.randn(h, n, 16).bfloat16() for h in (1, 1, 1))
def run(n):
    return attend_prefill(q[:, :n], k[:, :n], v[:, :n], Prefill(0.25), wants=Wants("mass"))
run(512)
Path("/proc/self/clear_refs").write_text("5")
def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))
before = status("VmRSS")
mass = run(n)[1]
assert abs(float(mass.sum()) / n - 1) < 2e-2
print((status("VmHWM") - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("plain", [True, False])
def test_prefill_with_mass_is_linear_in_memory(plain: bool) -> None:
    """16,384 tokens: one head's matrix would be 512 MiB in bfloat16, and 1,024 MiB in float32."""
    code = textwrap.dedent(MEMORY).format(plain=plain)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 400, f"{done.stdout.strip()} MiB"
