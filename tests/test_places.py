"""Every place against contiguous slots on the device: whatever is done to it, a step reads the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kvatlas.attention.decode import attend_step
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Encode, Layout, Place
from kvatlas.strategy.place.device import SlotStore
from kvatlas.strategy.place.disk import Disk
from kvatlas.strategy.place.flexgen import Percentages
from kvatlas.strategy.place.host import Host
from kvatlas.strategy.place.paged import Paged
from kvatlas.strategy.place.store import Store
from kvatlas.strategy.place.virtual import Virtual, VirtualStore, committed
from kvatlas.strategy.view import POS, Column, Selection, Span

ROWS, HEADS, GROUP, DIM = 3, 2, 3, 16
SCORE = Column("score", (), torch.float32)
PLACES: dict[str, Callable[[], Place]] = {
    "host": Host,
    "host link": lambda: Host(link=1000),
    "host serial": lambda: Host(link=1000, overlap=False),
    "virtual": lambda: Virtual(reserve=5000),
    "disk": Disk,
    "disk buffered": lambda: Disk(direct=False),
    "disk serial": lambda: Disk(overlap=False),
    "flexgen": Percentages,
    "flexgen device": lambda: Percentages(device=100, host=0),
    "flexgen host": lambda: Percentages(device=0, host=100, link=1000),
    "flexgen disk": lambda: Percentages(device=10, host=30, disk=60),
    "flexgen link": lambda: Percentages(device=33.3, host=33.3, disk=33.4, link=1000),
    "flexgen serial": lambda: Percentages(device=0, host=50, disk=50, link=1000, overlap=False),
}


def layout_of(capacity: int, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Layout:
    columns = (*Encode().columns(DIM, dtype), POS, SCORE)
    device = torch.device("cpu")
    return Layout(columns, Encode(), rows, HEADS, DIM, dtype, capacity, device, limit=lambda n: max(1, n // 2))


def tokens(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every column of some tokens."""
    make = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, *shape, DIM, generator=make).to(dtype)
    return {"k": k, "v": v, "pos": torch.full(shape, seed, dtype=torch.int32), "score": k.float().sum(-1)}


def pair(place: Place, capacity: int, dtype: torch.dtype = torch.float32) -> list[Store]:
    """A store of this place, and contiguous slots."""
    layout = layout_of(capacity, dtype)
    return [place.store(layout, place.shared(1)), SlotStore(layout)]


def filled(place: Place, lengths: tuple[int, ...], room: int = 8, dtype: torch.dtype = torch.float32) -> list[Store]:
    stores = pair(place, max(lengths) + room, dtype)
    for store in stores:
        for row, n in enumerate(lengths):
            store.extend(row, tokens(row, HEADS, n, dtype=dtype))
    return stores


def reads(store: Store, selection: Selection | None = None, spans: list[Span] | None = None) -> tuple[Tensor, Tensor]:
    """What a step of fixed queries sees: its output and the weight of every slot."""
    rows = len(store.lengths)
    q = torch.randn(rows, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(9)).to(store.layout.dtype)
    turn = lambda x, at: (x * (1 + at.view(-1, 1, 1, 1) / 100)).to(x.dtype)  # noqa: E731 - some rotation
    out, weights = attend_step(q, store.tiles(selection, spans), scale=0.25, weights=True, rotate=turn)
    assert weights is not None
    return out, weights


def agree(stores: list[Store], selection: Selection | None = None, spans: list[Span] | None = None) -> None:
    """The two read the same."""
    for got, want in zip(reads(stores[0], selection, spans), reads(stores[1], selection, spans)):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    assert torch.equal(stores[0].lengths, stores[1].lengths) and stores[0].filled == stores[1].filled


def chosen(store: Store, seed: int, share: float = 0.5) -> Selection:
    """Some slots of each KV head, different numbers of them."""
    make = torch.Generator().manual_seed(seed)
    n = store.filled
    rank = torch.rand(*store.lengths.shape, n, generator=make)
    free = torch.where(store.next < store.lengths, store.next, -1).unsqueeze(-1)
    rank.masked_fill_((torch.arange(n) >= store.lengths.unsqueeze(-1)) | (torch.arange(n) == free), -1.0)
    count = ((store.lengths - 1) * share * torch.rand(*store.lengths.shape, generator=make)).long().clamp(min=1)
    return Selection(rank.argsort(-1, descending=True)[..., : int(count.max())].contiguous(), count)


def victims(store: Store, seed: int) -> Tensor:
    """A slot of each KV head, none for some."""
    make = torch.Generator().manual_seed(seed)
    slots = (torch.rand(store.lengths.shape, generator=make) * store.lengths).long()
    return torch.where(torch.rand(store.lengths.shape, generator=make) < 0.8, slots, -1)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    yield PLACES[request.param]()


# ------------------------------------------------------------------------ reading


@pytest.mark.parametrize("lengths", [(5, 3, 4), (1500, 40, 1025), (2600, 2600, 2600)])
def test_everything_is_read_tile_by_tile(place: Place, lengths: tuple[int, ...]) -> None:
    stores = filled(place, lengths)
    agree(stores)
    agree(stores, spans=[Span(0, 4, torch.tensor([3, 2, 1])), Span(4, None, None)])
    for row in range(ROWS):
        for got, want in zip(stores[0].row_columns(row).values(), stores[1].row_columns(row).values(), strict=True):
            assert torch.equal(got, want)
    assert torch.equal(stores[0].keys(), stores[1].keys())
    assert torch.equal(stores[0].column("score"), stores[1].column("score"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selections_are_read_alone(place: Place, dtype: torch.dtype) -> None:
    stores = filled(place, (1500, 40, 1025), dtype=dtype)
    for seed in range(4):
        first, second = chosen(stores[0], seed), chosen(stores[0], seed + 10)
        both = Selection(
            first.index, first.count, beside=Selection(second.index, second.count, query_at=torch.arange(3))
        )
        for got, want in zip(reads(stores[0], both), reads(stores[1], both)):
            torch.testing.assert_close(got.float(), want.float(), atol=2e-3, rtol=2e-2)


def test_a_foreseen_selection_gets_the_new_token_beside_it(place: Place) -> None:
    stores = filled(place, (1500, 40, 1025))
    for seed in range(3):
        foreseen = chosen(stores[0], seed)
        stores[0].prefetch(foreseen)
        new = [store.append(tokens(100 + seed, ROWS, HEADS)) for store in stores]
        assert torch.equal(*new)
        whole = Selection(torch.cat([new[0].unsqueeze(-1), foreseen.index], -1), foreseen.count + 1, 0, foreseen)
        agree(stores, whole)
        for store in stores:
            store.drop(victims(store, seed))


# -------------------------------------------------------------------------- steps


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("lengths", [(30, 3, 17), (1030, 1000, 40)])
def test_steps_append_overwrite_and_read_ahead(place: Place, lengths: tuple[int, ...], evicts: bool) -> None:
    """More steps than wait to be written, past the room that was planned; each step reads all, or some."""
    stores = filled(place, lengths, room=4)
    for step in range(90):
        if step % 3:
            stores[0].prefetch(None)
        for store in stores:
            store.append(tokens(1000 + step, ROWS, HEADS))
        agree(stores, chosen(stores[0], step) if step % 4 == 3 else None)
        if evicts:
            for store in stores:
                store.drop(victims(stores[1], step))
    for store in stores:
        store.compact()
    agree(stores)


def test_what_is_read_ahead_for_the_next_layer_is_what_it_holds_by_then(place: Place) -> None:
    """Three layers share a link; each is fetched ahead while the one before is read, and appended to after that."""
    shared = place.shared(3)
    layout = layout_of(2100)
    layers = [[place.store(layout, shared), SlotStore(layout)] for _ in range(3)]
    for i, stores in enumerate(layers):
        for store in stores:
            for row, n in enumerate((2050, 1023, 40)):
                store.extend(row, tokens(10 * i + row, HEADS, n))
    for step in range(60):
        for i, stores in enumerate(layers):
            if i + 1 < len(layers):
                layers[i + 1][0].prefetch(None)
            slots = [store.append(tokens(1000 + 10 * step + i, ROWS, HEADS)) for store in stores]
            assert torch.equal(*slots)
            if step == 20:
                for store in stores:
                    store.write("v", slots[0].unsqueeze(-1), torch.ones(ROWS, HEADS, 1, DIM))
            agree(stores)
            if step % 2:
                for store in stores:
                    store.drop(victims(stores[1], 100 * step + i))
        if step == 30:  # one of them is written in between
            for stores in layers:
                for store in stores:
                    store.compact()
                    store.select_rows(torch.tensor([2, 0, 0]))


# --------------------------------------------------------------------- sequences


def test_sequences_are_forked_dropped_and_continued(place: Place) -> None:
    stores = filled(place, (140, 3, 300), room=40)
    for round_, rows in enumerate(([0, 2, 2, 1], [3, 1, 2], [0, 0, 0, 2], [1, 3])):
        index = torch.tensor(rows)
        for step in range(35):
            for store in stores:
                store.append(tokens(100 * round_ + step, len(store.lengths), HEADS))
        for store in stores:
            store.select_rows(index)
            store.extend(1, tokens(round_, HEADS, 130 + round_))
        agree(stores)
    for store in stores:
        store.load(0, tokens(77, HEADS, 9))
    agree(stores)


@pytest.mark.parametrize("name", ["k", "v", "score"])
def test_columns_are_taken_and_written_at_slots(place: Place, name: str) -> None:
    stores = filled(place, (140, 3, 300))
    for seed in range(5):
        for store in stores:
            store.append(tokens(50 + seed, ROWS, HEADS))
        index = chosen(stores[0], seed, share=0.9)
        slots = torch.where(torch.arange(index.index.shape[-1]) < index.count.unsqueeze(-1), index.index, -1)
        valid = slots >= 0
        assert torch.equal(stores[0].take(name, slots)[valid], stores[1].take(name, slots)[valid])
        values = torch.randn(*slots.shape, *stores[1].column(name).shape[3:])
        for store in stores:
            store.write(name, slots, values)
        assert torch.equal(stores[0].take(name, slots)[valid], values[valid])
        assert torch.equal(stores[0].column(name), stores[1].column(name))
        agree(stores)


def test_written_blocks_are_not_shared_any_more() -> None:
    """Paged: a fork's write is its own, and a prompt whose block was written to does not get it."""
    place = Paged(block=4)
    table = place.shared(2)
    plain = Encode()
    layout = Layout(plain.columns(DIM, torch.float32), plain, 2, HEADS, DIM, torch.float32, 16, torch.device("cpu"))
    layers = [place.store(layout, table) for _ in range(2)]
    ids = list(range(11))
    for layer in layers:
        layer.begin(0, 0)
        layer.extend(0, tokens(1, HEADS, 11))
    table.register(0, ids)
    for layer in layers:
        layer.extend(1, tokens(2, HEADS, 5))
    rows = torch.tensor([0, 0])
    for layer in layers:
        layer.select_rows(rows)
    before = layers[0].take("k", torch.arange(11).expand(2, HEADS, 11)).clone()
    slots = torch.tensor([[[5, -1], [-1, 9]], [[-1, -1], [-1, -1]]])
    layers[0].write("k", slots, torch.full((2, HEADS, 2, DIM), 7.0))
    after = layers[0].take("k", torch.arange(11).expand(2, HEADS, 11))
    want = before.clone()
    want[0, 0, 5] = want[0, 1, 9] = 7.0
    assert torch.equal(after, want)
    for layer in layers[1:]:
        assert torch.equal(layer.take("k", torch.arange(11).expand(2, HEADS, 11)), before)
    layers[0].write("k", slots.flip(0), torch.zeros(2, HEADS, 2, DIM))
    table.select_rows(torch.tensor([1, 1]))
    assert table.match_prefix(0, [*ids, 99]) == 4, "only the first block still follows from its text"


# ------------------------------------------------------------------------- tiers


def test_percentages_are_of_the_planned_tokens_and_growth_goes_to_the_last_tier() -> None:
    place = Percentages(device=20, host=30, disk=50)
    link = place.shared(1)
    store = place.store(layout_of(1000), link)
    for row in range(ROWS):
        store.extend(row, tokens(row, HEADS, 1000))
    held, each = store.bytes(), ROWS * HEADS * 128
    assert (held.device_payload, held.host_payload, held.disk_payload) == (200 * each, 300 * each, 500 * each)
    assert held.device_padding == ROWS * HEADS * 32 * 128 and held.host_padding == 0, "32 records may wait"
    assert held.disk_padding == 12 * each, "blocks of 128"
    before = link.transfers()
    reads(store)
    moved = link.transfers()
    assert moved.bytes - before.bytes == (300 + 512) * each, "what is on the device does not move"
    before = link.transfers()
    reads(store, Selection(torch.arange(100, 400).expand(ROWS, HEADS, 300), torch.full((ROWS, HEADS), 300)))
    assert link.transfers().bytes - before.bytes == 200 * each
    for step in range(40):
        store.append(tokens(step, ROWS, HEADS))
    held = store.bytes()
    assert (held.device_payload, held.host_payload, held.disk_payload) == (208 * each, 300 * each, 532 * each)


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ({"device": 50}, "device=50, host=80 and disk=0 add to 130; the percentages must add to 100"),
        ({"device": -20, "host": 120}, "device=-20, host=120 and disk=0 must be percentages, 0 to 100"),
        ({"device": 0, "host": 99.9}, "add to 99.9"),
        ({"dir": __file__}, "is not a folder"),
        ({"link": 0}, "link must be above 0 GB/s, not 0"),
    ],
)
def test_percentages_that_make_no_sense(shares: dict[str, float], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Percentages(**shares)  # type: ignore[arg-type]
    Percentages(device=33.3, host=33.3, disk=33.4)


# -------------------------------------------------------------------- address ranges


def resident(store: VirtualStore) -> list[list[list[int]]]:
    """Pages of memory behind each column, sequence and KV head, as the system counts them."""
    with open("/proc/self/pagemap", "rb") as pages:
        out = []
        for column in store.data.values():
            found = []
            for row in column:
                found.append([])
                for head in row:
                    pages.seek(head.data_ptr() // 4096 * 8)
                    entries = torch.frombuffer(bytearray(pages.read(head.nbytes // 4096 * 8)), dtype=torch.int64)
                    found[-1].append(int((entries < 0).sum()))  # the top bit: present
            out.append(found)
    return out


def needed(store: VirtualStore, lengths: list[int]) -> list[list[list[int]]]:
    sizes = [c.slot_bytes() for c in store.layout.columns]
    return [[[-(-n * size // 4096)] * HEADS for n in lengths] for size in sizes]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the page map")
def test_memory_follows_the_tokens_and_no_copy_is_made() -> None:
    """A range of 131,072 tokens: 48 MiB of addresses, of which only written pages are there."""
    place = Virtual()
    store = place.store(layout_of(310), None)
    assert isinstance(store, VirtualStore)
    where = {name: column.data_ptr() for name, column in store.data.items()}
    lengths = [140, 3, 300]
    for row, n in enumerate(lengths):
        store.extend(row, tokens(row, HEADS, n))
    assert resident(store) == needed(store, lengths)
    for step in range(700):
        store.append(tokens(step, ROWS, HEADS))
    lengths = [n + 700 for n in lengths]
    reads(store)
    assert resident(store) == needed(store, lengths)
    assert {name: column.data_ptr() for name, column in store.data.items()} == where, "it grew in place"
    pages = sum(n for column in resident(store) for row in column for n in row)
    counts = store.lengths.nbytes
    assert store.bytes().total == pages * 4096 + counts == committed(store.layout.columns, HEADS, lengths) + counts
    assert store.bytes().device_payload == sum(lengths) * HEADS * 128
    store.select_rows(torch.tensor([1, 1]))
    assert resident(store) == needed(store, [703, 703])
    assert store.bytes().total == committed(store.layout.columns, HEADS, [703, 703]) + 2 * store.lengths.nbytes


def test_pages_stay_committed_when_tokens_go() -> None:
    store = Virtual().store(layout_of(310), None)
    for row in range(ROWS):
        store.extend(row, tokens(row, HEADS, 300))
    before = store.bytes()
    for row in range(ROWS):
        store.load(row, tokens(row, HEADS, 5))
    after = store.bytes()
    assert after.device - after.device_payload == before.device - after.device_payload
    assert after.device_payload == 5 * ROWS * HEADS * 128


def test_what_was_reserved_is_the_limit() -> None:
    with pytest.raises(UserError, match="virtual: 310 tokens are more than reserve=300; set a larger reserve"):
        Virtual(reserve=300).store(layout_of(310), None)
    store = Virtual(reserve=12).store(layout_of(10), None)
    for row in range(ROWS):
        store.extend(row, tokens(row, HEADS, 11))
    store.append(tokens(5, ROWS, HEADS))
    with pytest.raises(UserError, match="13 tokens are more than reserve=12"):
        store.append(tokens(6, ROWS, HEADS))
    assert store.filled == 12 and store.lengths.tolist() == [[12, 12]] * ROWS
    with pytest.raises(UserError, match="reserve must be at least 1 token, not 0"):
        Virtual(reserve=0)
    with pytest.raises(UserError, match="set a smaller reserve"):
        Virtual(reserve=1 << 50).store(layout_of(10), None)
