"""ALISA's phases: what is not stored is computed again from the layer's inputs, for each KV head its own positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specs import lm_of, prompts
from test_places import DIM, HEADS, ROWS, agree, chosen, layout_of, victims
from tiny import HIDDEN, LAYERS
from torch import Tensor

from kvatlas.errors import UserError
from kvatlas.strategy.answers import Encode, Layout
from kvatlas.strategy.place.device import SlotStore
from kvatlas.strategy.place.phases import Phased, PhasedStore, distinct, split
from kvatlas.strategy.place.store import Store
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import Strategy

WIDTH = 24
PLACES = {
    "all phases": Phased(),
    "nothing stored": Phased(device=0, host=0),
    "host": Phased(device=0, host=1.0),
    "two phases": Phased(device=0.3, host=0),
    "tokens": Phased(device=40, host=25),
    "link": Phased(device=10, host=20, link=1000),
    "serial": Phased(device=0.2, host=0.2, link=1000, overlap=False),
}


class Model:
    """Sequences of inputs, and the projections that make keys and values of them. Positions count."""

    def __init__(self, rows: int = ROWS, tokens: int = 2400) -> None:
        make = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, tokens, WIDTH, generator=make)
        self.w = torch.randn(2, WIDTH, HEADS * DIM, generator=make) / WIDTH**0.5
        self.seen = [0] * rows
        self.computed: list[int] = []

    def kv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, n, WIDTH]`` at ``[B, n]`` -> ``[B, H, n, D]`` twice."""
        self.computed.append(positions.numel())
        turned = x * torch.cos(positions / 50).unsqueeze(-1)
        k, v = (torch.matmul(turned, w).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for w in self.w)
        return k, v

    def columns(self, row: int, n: int) -> dict[str, Tensor]:
        """The next tokens of a sequence, ``[H, n, ...]`` of every column."""
        at = torch.arange(self.seen[row], self.seen[row] + n).unsqueeze(0)
        k, v = self.kv(self.x[row, at], at)
        pos = at.int().expand(HEADS, n)
        return {"k": k[0], "v": v[0], "pos": pos, "score": pos.float()}

    def prefill(self, stores: list[Store], row: int, n: int) -> None:
        values, first = self.columns(row, n), self.seen[row]
        stores[0].put_inputs(row, first, self.x[row, first : first + n])
        for store in stores:
            store.extend(row, {c.name: values[c.name] for c in store.layout.columns})
        self.seen[row] += n

    def step(self, stores: list[Store]) -> None:
        at = torch.tensor(self.seen)
        rows = [self.columns(row, 1) for row in range(len(at))]
        stores[0].append_inputs(self.x[torch.arange(len(at)), at], at)
        for store in stores:
            names = [c.name for c in store.layout.columns]
            store.append({name: torch.stack([row[name][:, 0] for row in rows]) for name in names})
        self.seen = [n + 1 for n in self.seen]


def plan(capacity: int, positions: bool = True) -> Layout:
    layout = layout_of(capacity)
    columns = layout.columns if positions else Encode().columns(DIM, torch.float32)
    return replace(layout, columns=columns, hidden=WIDTH)


def started(place: Phased, lengths: tuple[int, ...], room: int, positions: bool = True) -> tuple[Model, list[Store]]:
    model, layout = Model(), plan(max(lengths) + room, positions)
    stores: list[Store] = [place.store(layout, place.shared(1)), SlotStore(layout)]
    stores[0].recompute = model.kv
    for row, n in enumerate(lengths):
        model.prefill(stores, row, n)
    return model, stores


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_a_growing_cache_reads_the_same_in_every_phase(name: str, positions: bool) -> None:
    model, stores = started(PLACES[name], (1500, 40, 1025), 8, positions)
    agree(stores)
    for step in range(30):
        stores[0].prefetch(None)
        model.step(stores)
        agree(stores, chosen(stores[0], step) if step % 3 == 2 else None)
    for row in range(ROWS):
        for got, want in zip(stores[0].row_columns(row).values(), stores[1].row_columns(row).values(), strict=True):
            torch.testing.assert_close(got, want)
    model.prefill(stores, 1, 70)
    agree(stores)


@pytest.mark.parametrize("name", PLACES)
def test_heads_that_kept_other_tokens_get_their_own(name: str) -> None:
    """Slots are overwritten, differently in each KV head; then sequences part, are closed up and grow."""
    model, stores = started(PLACES[name], (30, 3, 17), 4)
    for step in range(60):
        model.step(stores)
        agree(stores, chosen(stores[0], step) if step % 4 == 3 else None)
        for store in stores:
            store.drop(victims(stores[1], step))
    for store in stores:
        store.compact()
    agree(stores)
    rows = torch.tensor([2, 0, 0])
    for store in stores:
        store.select_rows(rows)
    model.x, model.seen = model.x[rows], [model.seen[row] for row in rows.tolist()]
    model.x[2, 80:] *= 2
    for _ in range(300):
        model.step(stores)
    agree(stores)


def test_what_is_stored_where_is_what_was_planned() -> None:
    place = Phased(device=40, host=25)
    model, stores = started(place, (60, 60, 60), 5, positions=False)
    each, store = ROWS * HEADS * 128, stores[0]
    assert isinstance(store, PhasedStore)
    held = store.bytes()
    assert (held.device_payload, held.host_payload) == (35 * each, 25 * each)
    assert (held.device_padding, held.host_padding) == (5 * each, 0), "the last slots are still free"
    assert held.host_metadata == ROWS * 65 * WIDTH * 4
    assert held.total == place.bytes_held(store.layout) + held.device_metadata
    for _ in range(6):
        model.step(stores)
    held, capacity = store.bytes(), store.capacity
    assert capacity > 65 and [s.slots for s in store.segments] == [capacity - 65, 25, 40]
    assert held.device_payload + held.host_payload < (66 - (capacity - 65)) * each + 1 or capacity - 65 > 66
    assert held.device_payload + held.device_padding == 40 * each
    assert held.host_payload + held.host_padding == 25 * each
    assert held.host_metadata == store.inputs.x.nbytes >= ROWS * 66 * WIDTH * 4
    agree(stores)


def test_only_what_is_not_stored_is_computed_and_each_position_once() -> None:
    """Whether all KV heads hold the same tokens there, or one has 30 others."""
    model, stores = started(Phased(device=500, host=600), (1500, 1500, 1500), 100)
    link = stores[0].link  # type: ignore[attr-defined]
    for others in (0, 30):
        if others:
            exchange(stores, others, 1000)
        model.computed.clear()
        before = link.transfers().bytes
        agree(stores)
        assert sum(model.computed) == ROWS * (500 + others)
        inputs, payload = sum(model.computed) * WIDTH, ROWS * HEADS * 600 * 2 * DIM
        assert link.transfers().bytes - before == 4 * (inputs + payload)


def exchange(stores: list[Store], n: int, late: int) -> None:
    """KV head 1 of every sequence: slots 0 .. n - 1 and n slots from ``late`` on change places."""
    for store in stores:
        for row in range(ROWS):
            columns = {name: column.clone() for name, column in store.row_columns(row).items()}
            for column in columns.values():
                early = column[1, :n].clone()
                column[1, :n] = column[1, late : late + n]
                column[1, late : late + n] = early
            store.load(row, columns)


def test_distinct_positions() -> None:
    positions = torch.tensor([[[5, 2, 9], [2, 5, 7]], [[4, 4, 4], [4, 4, 0]]])
    wanted, where = distinct(positions)
    assert wanted.tolist() == [[2, 5, 7, 9], [0, 4, 0, 0]]
    assert torch.equal(torch.take_along_dim(wanted.unsqueeze(1), where, -1), positions)


def test_slots_of_the_phases() -> None:
    assert split(10, 20, 5) == (0, 0, 10)
    assert split(24, 20, 5) == (0, 4, 20)
    assert split(40, 20, 5) == (15, 5, 20)
    assert Phased(device=0.5, host=300).limits(1000) == (500, 300)
    for bad in ({"device": -0.1}, {"host": 2.5}):
        with pytest.raises(UserError, match="must be a fraction up to 1 or whole tokens"):
            Phased(**bad)


def test_a_reader_cannot_turn_what_is_computed_again() -> None:
    _, stores = started(Phased(device=10, host=10), (60, 60, 60), 5)
    at = torch.full((ROWS, HEADS, 1), 64 - 5)
    stores[0].write("k", at, torch.zeros(ROWS, HEADS, 1, DIM))
    with pytest.raises(UserError, match="computed again each time"):
        stores[0].write("k", at - 50, torch.zeros(ROWS, HEADS, 1, DIM))


# -------------------------------------------------------------------- on models


def with_phases(spec: str, place: Phased) -> Strategy:
    return replace(parse(spec), place=place)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral", "opt", "gpt_oss"])
def test_inputs_give_the_keys_and_values_that_attention_had(arch: str) -> None:
    """Weight, bias, norm, RoPE: each layer's own, at any positions, in any order."""
    lm, ids = lm_of(arch), prompts(40)
    inputs: list[Tensor] = []
    hooks = [
        attention.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(kwargs.get("hidden_states", args[0] if args else None)),
            with_kwargs=True,
        )
        for attention in lm.port.attentions
    ]
    cache = lm.new_cache("full")
    lm.prefill(cache, ids, 4)
    for hook in hooks:
        hook.remove()
    assert len(inputs) == LAYERS and inputs[0].shape == (1, 40, HIDDEN)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    for i, (x, layer) in enumerate(zip(inputs, cache.layers)):
        k, v = lm.port.recompute(i, x[:, order], order.unsqueeze(0))
        held = layer.store.row_columns(0)
        at = held["pos"][0].long() if "pos" in held else torch.arange(40)
        where = order.argsort()[at]  # a layer with a window of its own holds only the last tokens
        torch.testing.assert_close(k[0, :, where], held["k"], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(v[0, :, where], held["v"], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("place", [Phased(), Phased(device=0, host=0), Phased(device=8, host=6)])
@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "alisa:0.4", "oracle:0.3", "int8"])
@pytest.mark.parametrize("arch", ["llama", "gpt_oss"])
def test_models_give_the_same_tokens_in_every_phase(arch: str, spec: str, place: Phased) -> None:
    lm, ids = lm_of(arch), prompts(40, 23, 31)
    strategies = (with_phases(spec, place), replace(parse(spec), place=parse("full").place))
    one, other = ([g.ids for g in lm.generate(ids, strategy, max_new_tokens=20)] for strategy in strategies)
    assert one == other
