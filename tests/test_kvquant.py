"""KVQuant: levels, packing, outliers, first tokens, keys before RoPE; what calibration finds; how near it stays."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specs import lm_of, prompts, theirs
from tiny import HEAD_DIM, KV_HEADS, LAYERS, tiny_model
from torch import Tensor
from transformers import DynamicCache

import kvatlas
from kvatlas.engine.cache import KVCache
from kvatlas.engine.calibrate import calibrate
from kvatlas.engine.lm import LM, cache_name
from kvatlas.engine.replay import RecordedPort
from kvatlas.errors import UserError
from kvatlas.model.gradients import kv_gradients
from kvatlas.strategy.encode.kvquant import Fitted, KVQuant, channel_range, extremes, opened, range_codes
from kvatlas.strategy.encode.levels import at_level, fit_levels, nearest_level, pack, packed_bytes, unpack
from kvatlas.strategy.spec import parse
from kvatlas.strategy.view import LayerFacts

RAGGED = (40, 23, 31)
DIM = 64


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """A rotation by halves."""
    half = x.shape[-1] // 2
    angle = positions.unsqueeze(-1) * 100.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def facts_of(heads: int = 2, dim: int = DIM, dtype: torch.dtype = torch.float32) -> LayerFacts:
    return LayerFacts(0, 1, heads, heads, dim, dtype, torch.device("cpu"), dim**-0.5)


def fitted(k: Tensor, v: Tensor, turned: bool = True, rows: int = 1, **parameters: Any) -> Fitted:
    """The encoder of a layer, calibrated on keys at position 0 ``[H, N, D]`` and values, for ``rows`` sequences."""
    method, facts = KVQuant(**parameters), facts_of(k.shape[0], k.shape[-1], k.dtype)
    port = RecordedPort(parse("full"), k.shape[0], None, rope if turned else None)
    k = rope(k, torch.arange(k.shape[1])) if turned else k
    constants = method.bind(facts, port, {}, {}).calibrate(facts, k, k, v, None, None)
    state = {name: t.unsqueeze(0).repeat(rows, *(1 for _ in t.shape)) for name, t in method.begin(facts).items()}
    made = method.bind(facts, port, constants, state)
    assert isinstance(made, Fitted)
    return made


def some(n: int = 300, heads: int = 2, dim: int = DIM, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys whose channels have ranges of their own, and values whose tokens have; a few elements stand out."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(heads, n, dim, generator=g) * torch.logspace(-1, 1, dim) + torch.linspace(-3, 3, dim)
    v = torch.randn(heads, n, dim, generator=g) * torch.logspace(-2, 1, n).unsqueeze(-1)
    return k, v


def round_trip(encoder: Fitted, k: Tensor, v: Tensor, at: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Columns of keys and values ``[H, n, D]`` at ``at [n]``, and what they decode to."""
    positions = at.expand(k.shape[0], -1)
    values = encoder.encode(k, v, positions)
    batched = {name: t.unsqueeze(0) for name, t in (values | {"pos": positions.int()}).items()}
    decoded_k, decoded_v = encoder.decode(batched)
    return values, decoded_k[0], decoded_v[0]


# ------------------------------------------------------------------------ levels


@given(st.integers(2, 4), st.integers(1, 80), st.integers(0, 1000))
def test_packing_keeps_every_code(bits: int, n: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (3, 2, n), generator=g, dtype=torch.int32)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 2, packed_bytes(n, bits))
    assert torch.equal(unpack(packed, bits, n), codes)


@pytest.mark.parametrize(("bits", "size"), [(2, 16), (3, 24), (4, 32)])
def test_packed_codes_are_as_small_as_they_say(bits: int, size: int) -> None:
    assert packed_bytes(64, bits) == size and packed_bytes(65, bits) == size + bits


def test_levels_are_the_means_of_clusters_by_weight() -> None:
    x = torch.tensor([5.0, -1.0, -1.2, 5.2, 0.1, -0.9, 0.0])
    torch.testing.assert_close(fit_levels(x, torch.ones(7), 3), torch.tensor([-3.1 / 3, 0.05, 5.1]))
    w = torch.tensor([3.0, 1, 1, 1, 1, 1, 1])
    torch.testing.assert_close(fit_levels(x, w, 3), torch.tensor([-3.1 / 3, 0.05, 5.05]))
    assert fit_levels(torch.tensor([2.0, 2.0]), torch.ones(2), 4).tolist() == [2.0] * 4
    assert fit_levels(x, torch.zeros(7), 3).tolist() == fit_levels(x, torch.ones(7), 3).tolist()


@given(st.integers(0, 200))
def test_levels_are_a_fixed_point_and_ascend(seed: int) -> None:
    """Each level is the weighted mean of the values nearest to it; no fit is worse than evenly spaced levels."""
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(500, generator=g), torch.rand(500, generator=g)
    levels = fit_levels(x, w, 8, iterations=10_000)
    codes = nearest_level(x, levels)
    assert torch.equal(levels, levels.sort().values)
    assert torch.equal(codes.long(), (x.unsqueeze(-1) - levels).abs().argmin(-1))
    for code in range(8):
        mine = codes == code
        torch.testing.assert_close((x * w)[mine].sum() / w[mine].sum(), levels[code], atol=1e-5, rtol=1e-5)

    def cost(of: Tensor) -> float:
        return float((w * (x - at_level(nearest_level(x, of), of)).square()).sum())

    assert cost(levels) <= cost(torch.linspace(float(x.min()), float(x.max()), 8)) + 1e-6


# --------------------------------------------------------------- ranges, outliers


@given(st.integers(0, 3), st.integers(4, 12), st.integers(0, 1000))
def test_extremes_leave_the_least_range(places: int, n: int, seed: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    at, low, high = extremes(x, places)
    assert len(set(at.tolist())) == places
    left = [i for i in range(n) if i not in at.tolist()]
    assert float(low) == float(x[left].min()) and float(high) == float(x[left].max())
    best = min(float(x[list(kept)].max() - x[list(kept)].min()) for kept in combinations(range(n), n - places))
    assert float(high - low) == pytest.approx(best)


@given(st.floats(-1e4, 1e4), st.floats(0, 1e4))
def test_a_range_in_two_bytes_holds_what_it_should(low: float, width: float) -> None:
    """It may be wider by a step of an eighth of a power of two, and misses an end by a 127th of its half at most."""
    codes = range_codes(torch.tensor([low]), torch.tensor([low + width]))
    assert codes.dtype == torch.uint8 and codes.shape == (2,)
    middle, half = (float(x) for x in opened(codes))
    bottom, top = min(low, 0.0), max(low + width, 0.0)
    assert middle - half <= bottom + half / 120 and middle + half >= top - half / 120
    assert half <= max((top - bottom) / 2 * 2**0.126, 2**-16)


def test_a_channels_range_leaves_out_both_tails() -> None:
    x = torch.arange(201.0).view(1, 201, 1)
    middle, half = channel_range(x, 0.1)
    assert middle.item() == 100 and half.item() == 90
    assert channel_range(torch.ones(1, 5, 1), 0.01)[1].item() > 0, "a channel of one value can be divided by"


# -------------------------------------------------------------------------- codes


@pytest.mark.parametrize("dim", [16, 20, 64, 80])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_errors_are_within_half_a_gap_and_outliers_exact(bits: int, dim: int) -> None:
    k, v = some(dim=dim)
    encoder = fitted(k, v, bits=bits, outliers=0.05, first=0)
    values, back_k, back_v = round_trip(encoder, k, v, torch.zeros(k.shape[1], dtype=torch.int64))
    places = encoder.method.places(dim)
    assert {c.name: c.tail for c in encoder.columns(dim, k.dtype)} == {n: (t.shape[-1],) for n, t in values.items()}
    at_k, at_v = values["apart_at"].long().chunk(2, -1)
    assert at_k.shape[-1] == places
    assert torch.equal(back_k.gather(-1, at_k), k.gather(-1, at_k).half().float())
    assert torch.equal(back_v.gather(-1, at_v), v.gather(-1, at_v).half().float())
    c, (middle, half) = encoder.constants, opened(values["v_range"])
    for x, back, levels, zero, scale, at in (
        (k, back_k, c["k_levels"], c["k_zero"], c["k_scale"], at_k),
        (v, back_v, c["v_levels"], middle, half, at_v),
    ):
        normal, error = (x - zero) / scale, ((x - back) / scale).abs()
        inside = (normal >= levels[0]) & (normal <= levels[-1])
        assert float(error[inside].max()) <= float(levels.diff().max()) / 2 + 1e-4
        beyond = torch.maximum(levels[0] - normal, normal - levels[-1]).clamp(min=0.0)
        left = (~inside).scatter(-1, at, False)  # these get the last level
        torch.testing.assert_close(error[left], beyond[left], atol=1e-3, rtol=1e-3)


def test_the_worst_served_elements_of_a_key_are_kept_apart() -> None:
    k, v = some()
    encoder = fitted(k, v, bits=3, outliers=0.03, first=0)
    plain = fitted(k, v, bits=3, outliers=0.0, first=0)
    object.__setattr__(plain, "constants", encoder.constants)
    zeros = torch.zeros(k.shape[1], dtype=torch.int64)
    values, _, _ = round_trip(encoder, k, v, zeros)
    _, without, _ = round_trip(plain, k, v, zeros)
    worst = (k - without).abs().topk(2, -1).indices
    assert torch.equal(values["apart_at"].long()[..., :2].sort(-1).values, worst.sort(-1).values)
    assert "apart" not in plain.encode(k, v, zeros.expand(2, -1))


def test_keys_are_quantised_as_if_at_position_0() -> None:
    """The same key at any position gives the same codes, and is turned there again."""
    k, v = some()
    encoder = fitted(k, v, first=0)
    for start in (0, 5, 1000):
        at = torch.arange(start, start + k.shape[1])
        values, back, _ = round_trip(encoder, rope(k, at), v, at)
        here, still, _ = round_trip(encoder, k, v, torch.zeros_like(at))
        same = (values["k_codes"] == here["k_codes"]).float().mean()
        assert float(same) > 0.99, "but for rounding at the edges"
        close = (rope(still, at) - back).norm(dim=-1) <= 1e-3 * back.norm(dim=-1)
        assert float(close.float().mean()) > 0.95


def test_before_rope_is_better_than_after() -> None:
    """Channels with a range of their own are what a rotation mixes up."""
    k, v = some(1000)
    k, at = k + 20 * torch.linspace(-1, 1, DIM), torch.arange(k.shape[1])
    errors = [
        (round_trip(encoder, rope(k, at), v, at)[1] - rope(k, at)).square().mean()
        for encoder in (fitted(k, v, first=0), fitted(rope(k, at), v, turned=False, first=0))
    ]
    assert errors[0] < errors[1] / 3


def test_keys_without_a_rotation_are_quantised_as_they_come() -> None:
    k, v = some()
    encoder = fitted(k, v, turned=False, first=0)
    assert encoder.port is None and encoder.words().endswith("as they come")
    _, back, _ = round_trip(encoder, k, v, torch.arange(k.shape[1]))
    assert float((k - back).square().mean() / k.square().mean()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_first_tokens_come_back_as_they_were(dtype: torch.dtype) -> None:
    """In whatever chunks the prompt comes, wherever the slots lie, and only as many as the prompt has."""
    k, v = (x.to(dtype) for x in some())
    encoder = fitted(k, v, rows=3, first=3)
    state = [{name: t[row] for name, t in encoder.state.items()} for row in range(3)]
    encoder.note(state[0], k[:, :10], v[:, :10], torch.arange(10))
    encoder.note(state[1], k[:, :2], v[:, :2], torch.arange(2))
    encoder.note(state[1], k[:, 2:10], v[:, 2:10], torch.arange(2, 10))
    encoder.note(state[2], k[:, :2], v[:, :2], torch.arange(2))
    encoder.note(state[2], k[:, 5:9], v[:, 5:9], torch.arange(5, 9))  # positions 2 to 4 were generated
    assert encoder.state["first_count"].tolist() == [3, 3, 2]
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    at = order.expand(3, 2, -1)
    values = encoder.encode(k[:, order].expand(3, -1, -1, -1), v[:, order].expand(3, -1, -1, -1), at)
    back_k, back_v = encoder.decode(values | {"pos": at.int()})
    assert back_k.dtype == back_v.dtype == dtype
    for row, raw in enumerate((3, 3, 2)):
        exact = order < raw
        assert torch.equal(back_k[row][:, exact], k[:, order][:, exact])
        assert torch.equal(back_v[row][:, exact], v[:, order][:, exact])
        assert not torch.equal(back_k[row][:, ~exact], k[:, order][:, ~exact])
    alone, _ = encoder.of_row(2).decode({name: t[2:] for name, t in (values | {"pos": at.int()}).items()})
    assert torch.equal(alone[0], back_k[2])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("kvquant:bits=5", "bits must be 2, 3 or 4, not 5"),
        ("kvquant:outliers=0.5", "outliers must be 0 or more and below 0.5"),
        ("kvquant:first=-1", "first must be 0 or more"),
        ("kvquant:0.5", "takes no budget"),
        ("kvquant+int4", "both answer 'encode'"),
    ],
)
def test_bad_parameters_get_one_clear_line(spec: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        parse(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_4_bits_take_no_more_bytes_than_int4(bits: int) -> None:
    """Keys and values of a token in one head of 64: codes, an outlier of each with its index, a range."""
    size = sum(c.slot_bytes() for c in KVQuant(bits=bits).columns(64, torch.float32))
    assert size == 2 * 8 * bits + 2 * 3 + 2
    assert size <= sum(c.slot_bytes() for c in parse("int4").encode.columns(64, torch.float32))


# -------------------------------------------------------------------- calibration


class Nudged(DynamicCache):
    """transformers' cache, with one number of one key or value of a layer moved."""

    def __init__(self, layer: int, which: int, at: tuple[int, ...], by: float, **more: Any) -> None:
        super().__init__(**more)
        self.change = (layer, which, at, by)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        layer, which, at, by = self.change
        if layer == layer_idx:
            (key_states, value_states)[which][(0, *at)] += by
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt_oss", "opt"])
def test_gradients_are_the_losss(arch: str) -> None:
    """By finite differences; no weight has a gradient afterwards, and the last token's keys matter to nobody."""
    model = tiny_model(arch)
    ids = prompts(24)[0]
    found = kv_gradients(model, ids, cache_name())
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    tokens = torch.tensor([ids])

    @torch.no_grad()
    def loss(layer: int, which: int, at: tuple[int, ...], by: float) -> float:
        cache = Nudged(layer, which, at, by, config=model.config)
        logits = model(input_ids=tokens, use_cache=True, **{cache_name(): cache}).logits
        return float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum"))

    for layer, which, at in ((0, 0, (1, 3, 5)), (2, 0, (0, 20, 1)), (1, 1, (1, 10, 15)), (3, 1, (0, 2, 0))):
        gradient = found[layer][which]
        assert gradient is not None and gradient.shape[1:] == (24, HEAD_DIM)
        slope = (loss(layer, which, at, 1e-2) - loss(layer, which, at, -1e-2)) / 2e-2
        assert float(gradient[at]) == pytest.approx(slope, rel=0.02, abs=0.01)
        assert not bool(gradient[:, -1].any())


def test_levels_follow_the_gradients() -> None:
    """Channels that the loss depends on draw the levels to where their values lie."""
    g, facts = torch.Generator().manual_seed(0), facts_of()
    v = torch.rand(2, 200, DIM, generator=g) * 2 - 1
    v[..., :8] = v[..., :8].pow(3) / 2  # near the middle, where half of the levels are for them
    k = v.clone()
    encoder = fitted(k, v, turned=False, first=0)
    slopes = torch.full_like(v, 1e-3)
    slopes[..., :8] = 1.0
    flat = encoder.calibrate(facts, k, k, v, None, None)
    drawn = encoder.calibrate(facts, k, k, v, slopes, slopes[:, :150])
    assert torch.equal(flat["k_zero"], drawn["k_zero"])
    for name in ("k_levels", "v_levels"):
        inner = [int((constants[name].abs() < 0.25).sum()) for constants in (flat, drawn)]
        assert inner[1] >= inner[0] + 2, (name, inner)


def test_first_tokens_take_no_part_in_calibration() -> None:
    k, v = some()
    odd_k, odd_v = k.clone(), v.clone()
    odd_k[:, :2], odd_v[:, :2] = 1e4, -1e4
    one, other = fitted(k, v, turned=False, first=2), fitted(odd_k, odd_v, turned=False, first=2)
    assert all(torch.equal(t, other.constants[name]) for name, t in one.constants.items())


def test_constants_are_found_once_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = LM(tiny_model("llama"))
    asked = []
    from kvatlas.engine import lm as module

    monkeypatch.setattr(module, "calibrate", lambda lm, answer: asked.append(answer) or calibrate(lm, answer))
    assert lm.constants(parse("full")) is None
    alone = lm.constants(parse("kvquant"))
    both = lm.constants(parse("infinigen:0.4+kvquant"))
    assert lm.constants(parse("h2o:0.3+kvquant+host")) is alone and lm.constants(parse("infinigen+kvquant")) is both
    assert [type(a).__name__ for a in asked] == ["KVQuant", "Speculated"]
    assert len(both) == LAYERS and set(both[2]) == {"skew", "k_zero", "k_scale", "k_levels", "v_levels"}
    assert all(both[i]["k_zero"] is alone[i]["k_zero"] for i in range(LAYERS))
    lm.constants(parse("kvquant:bits=2"))
    assert len(asked) == 3
    assert not lm.bridge.handles or not torch.is_grad_enabled() or all(p.grad is None for p in lm.model.parameters())


def test_calibration_is_the_same_every_time() -> None:
    one, other = (LM(tiny_model("qwen3")).constants(parse("kvquant:bits=3")) for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other) for name in a)


def test_a_cache_without_constants_is_refused() -> None:
    lm = lm_of("llama")
    with pytest.raises(UserError, match="must be calibrated"):
        KVCache(parse("kvquant"), lm.shape, lm.port)


# ------------------------------------------------------------------------- models

KL = {"kvquant": 0.2, "kvquant:bits=3": 0.5, "kvquant:bits=2": 1.0}
"""Most mean KL to full, in nats, on tiny random models, whose heads are sharper than a real model's."""


def logits_of(lm: LM, ids: list[list[int]], spec: str, steps: int = 5) -> tuple[KVCache, Tensor]:
    """Log-probabilities ``[steps, B, V]`` of steps with given tokens."""
    cache = lm.new_cache(spec)
    lm.prefill(cache, ids, reserve=steps)
    fed = torch.randint(2, 256, (steps,), generator=torch.Generator().manual_seed(5))
    return cache, torch.stack([lm.step(cache, t.expand(len(ids))).double().log_softmax(-1) for t in fed])


@pytest.mark.parametrize("spec", KL)
@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral", "gpt_oss", "opt"])
def test_kvquant_stays_near_full_in_any_company(arch: str, spec: str) -> None:
    lm, ids = lm_of(arch), prompts(*RAGGED)
    _, full = logits_of(lm, ids, "full")
    cache, own = logits_of(lm, ids, spec)
    kl = (full.exp() * (full - own)).sum(-1)
    assert 0 < float(kl.mean()) < KL[spec]
    for row in range(3):
        _, alone = logits_of(lm, ids[row : row + 1], spec)
        torch.testing.assert_close(alone[:, 0], own[:, row], atol=1e-3, rtol=1e-3)
    turned = [layer.encode.port is not None for layer in cache.layers if isinstance(layer.encode, Fitted)]
    assert turned and all(t == (arch != "opt") for t in turned)


@pytest.mark.parametrize("arch", ["llama", "opt"])
@pytest.mark.parametrize(
    "spec",
    ["h2o:0.3+kvquant", "kvquant+host", "oracle:0.2+kvquant:bits=3", "kvquant:first=4+paged", "infinigen+kvquant"],
)
def test_kvquant_composes(arch: str, spec: str) -> None:
    lm, ids = lm_of(arch), prompts(*RAGGED)
    cache, own = logits_of(lm, ids, spec)
    _, alone = logits_of(lm, ids[1:2], spec)
    torch.testing.assert_close(alone[:, 0], own[:, 1], atol=1e-3, rtol=1e-3)
    assert cache.bytes().total == cache.bytes_held(RAGGED, 5)
    raw = spec.replace("+kvquant", "").replace(":bits=3", "").replace("kvquant+", "").replace("kvquant:first=4+", "")
    _, near = logits_of(lm, ids, raw)
    assert float((near.exp() * (near - own)).sum(-1).mean()) < 0.5


def test_a_dynamic_rope_is_left_as_it_is() -> None:
    """Its frequencies change with the length, so no key can be turned back: they are quantised as they come."""
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    lm = LM(tiny_model("llama", rope_parameters=parameters))
    cache, own = logits_of(lm, prompts(40), "kvquant")
    _, full = logits_of(lm, prompts(40), "full")
    assert all(layer.encode.port is None for layer in cache.layers)  # type: ignore[attr-defined]
    assert float((full.exp() * (full - own)).sum(-1).mean()) < 0.2


def test_nothing_is_quantised_twice() -> None:
    """What an evicting cache moves are the codes; they are what the whole prompt's were, also after more steps."""
    lm, ids = lm_of("llama"), prompts(40)
    whole, kept = lm.new_cache("kvquant"), lm.new_cache("h2o:0.5+kvquant")
    for cache in (whole, kept):
        lm.prefill(cache, ids, reserve=12)
    for steps in (0, 6):
        for _ in range(steps):
            for cache in (whole, kept):
                lm.step(cache, torch.tensor([7]))
        kept.select_rows([0])
        one, other = whole.layers[0].store, kept.layers[0].store
        n = int(other.lengths[0, 0])
        at = other.column("pos")[:, :, :n].long()
        assert n <= 21
        for spec in other.layout.columns:
            if spec.kind == "payload":
                slots = torch.arange(n).expand(1, KV_HEADS, n)
                assert torch.equal(one.take(spec.name, at), other.take(spec.name, slots)), spec.name


def test_the_first_tokens_follow_their_sequence() -> None:
    """Raw in every row after rows were reordered and repeated, and however the prompt came in."""
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    cache = lm.new_cache("kvquant:first=2,prefill=chunked:7")
    plain = lm.new_cache("full")
    for c in (cache, plain):
        lm.prefill(c, ids, reserve=8)
        c.select_rows([2, 0, 0])
        lm.step(c, torch.tensor([3, 4, 5]))
    for layer, raw in ((cache.layers[0], plain.layers[0]),):
        assert torch.equal(layer.store.keys()[:, :, :2], raw.store.keys()[:, :, :2])
        assert not torch.equal(layer.store.keys()[:, :, 2:30], raw.store.keys()[:, :, 2:30])


def test_the_bridge_gives_the_engines_tokens() -> None:
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    cache = kvatlas.cache("kvquant", lm.model)
    assert theirs(lm.model, ids, cache=cache) == [g.ids for g in lm.generate(ids, "kvquant", max_new_tokens=10)]


@pytest.mark.parametrize("with_rope", [True, False])
def test_replay_calibrates_on_the_recorded_prompt(with_rope: bool) -> None:
    g = torch.Generator().manual_seed(1)
    q, v = torch.randn(4, 50, 16, generator=g), torch.randn(2, 50, 16, generator=g)
    k = rope(torch.randn(2, 50, 16, generator=g), torch.arange(50))
    turn = rope if with_rope else None
    exact = kvatlas.replay("full", q, k, v, 40)
    near = kvatlas.replay("kvquant", q, k, v, 40, rope=turn)
    far = kvatlas.replay("kvquant:bits=2", q, k, v, 40, rope=turn)
    errors = [(r.output - exact.output).square().mean() / exact.output.square().mean() for r in (near, far)]
    assert 0 < errors[0] < 0.02 < errors[1] < 0.5
    evicted = kvatlas.replay("h2o:10+kvquant", q, k, v, 40, rope=turn)
    assert evicted.kept[-1].shape == (2, 10) and bool(torch.isfinite(evicted.output).all())


def test_no_prefix_is_shared_whose_first_tokens_a_sequence_would_not_have() -> None:
    lm, (prompt,) = lm_of("llama"), prompts(40)
    ids = [[*prompt[:32], *more] for more in ([5, 6, 7], [8, 9])]
    _, together = logits_of(lm, ids, "kvquant+paged:block=4")
    _, alone = logits_of(lm, ids[1:], "kvquant+paged:block=4")
    torch.testing.assert_close(together[:, 1], alone[:, 0], atol=1e-4, rtol=1e-4)
