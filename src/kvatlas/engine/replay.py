"""A strategy on recorded attention, without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvatlas.attention.prefill import Prefill
from kvatlas.engine.clock import Clock
from kvatlas.engine.layer import LayerCache
from kvatlas.errors import UserError
from kvatlas.strategy.place.device import Device
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import LayerFacts

Rope = Callable[[Tensor, Tensor], Tensor]
"""``rope(x [..., T, D], positions [T]) -> rotated x``: turns un-rotated vectors to positions."""


@dataclass(slots=True)
class Replay:
    """What a strategy did.

    Attributes:
        kept: sorted true positions ``[H, n]`` after the prefill and after each later token.
        read: sorted true positions that each later token attended to, ``[H, n]`` (a list per KV head where their
            numbers differ).
        output: ``[T - prompt_len, Hq, D]``.
        covered: with ``diagnose``, ``[T - prompt_len, Hq]``: the share of full attention's mass that was read.
        overlap: with ``diagnose``, ``[T - prompt_len, H]``: of equally many best keys (by the group's mean mass), the
            share that was read.
        prefill_output: ``[prompt_len, Hq, D]``.
        scores: accumulated mass of the kept keys, where the rule keeps one, sorted as ``kept``.
    """

    kept: list[Tensor]
    read: list[Tensor | list[Tensor]]
    output: Tensor
    prefill_output: Tensor
    covered: Tensor | None = None
    overlap: Tensor | None = None
    scores: list[Tensor] = field(default_factory=list)


class RecordedPort:
    """The model's part, from what was recorded: ``w_q`` and ``rope``."""

    def __init__(self, strategy: Strategy, heads: int, w_q: Tensor | None, rope: Rope | None) -> None:
        self.strategy, self.heads, self.w_q, self.rope = strategy, heads, w_q, rope

    def project_query(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        assert self.w_q is not None
        q = (x @ self.w_q.T).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return q if self.rope is None else self.rope(q, positions[0])

    def rotate(self, layer: int, q: Tensor, from_positions: Tensor, to_positions: Tensor) -> Tensor:
        if torch.equal(from_positions, to_positions.expand_as(from_positions)):
            return q
        if self.rope is None:
            raise UserError(
                f"'{self.strategy.name}' sees keys from another position: pass rope=, or use positions=true"
            )
        delta = to_positions - from_positions
        if delta.dim() == 3:  # each head at its own positions: all vectors in a row
            flat = q.reshape(1, 1, -1, q.shape[-1])
            return self.rope(flat, delta.expand(q.shape[:3]).flatten()).view_as(q)
        return self.rope(q, delta[0])

    def recompute(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        raise UserError(f"'{self.strategy.name}' computes keys again from the model's inputs, which replay has not")


def replay(
    spec: str | Strategy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompt_len: int,
    *,
    hidden: Tensor | None = None,
    w_q: Tensor | None = None,
    rope: Rope | None = None,
    diagnose: bool = False,
) -> Replay:
    """Run a strategy over recorded queries, keys and values, in a layer where it works.

    Args:
        spec: a strategy such as ``"h2o:0.3"``.
        q: ``[Hq, T, D]``; k, v: ``[H, T, D]``: floats as they reach attention (after RoPE). Scores are scaled by
            1/sqrt(D).
        prompt_len: tokens of the prefill; each later token is one decode step.
        hidden: ``[T, hidden]`` attention input of the layer before, for strategies that speculate.
        w_q: ``[Hq * D, hidden]`` query weight, used as ``hidden @ w_q.T``.
        rope: rotation, for speculation in a model with RoPE and for strategies that change distances.
        diagnose: also say how much of the attention was covered.

    Raises:
        UserError: shapes that do not fit, or something that the strategy needs and was not given.
    """
    strategy = parse(spec)
    if strategy.place.wants_inputs:  # none are recorded, and where tokens lie changes nothing of what is kept or read
        strategy = replace(strategy, place=Device())
    _check(strategy, q, k, v, prompt_len, hidden, w_q)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    heads, total, dim = q.shape
    facts = LayerFacts(
        strategy.read.first_layer, strategy.read.first_layer + 1, heads, k.shape[0], dim, k.dtype, k.device, dim**-0.5
    )
    port = RecordedPort(strategy, heads, w_q, rope)
    constants = _constants(strategy, facts, port, q[:, :prompt_len], k[:, :prompt_len], v[:, :prompt_len])
    shared = strategy.place.shared(1)
    clock = Clock(False, diagnose=True)
    how = Prefill(facts.scale, eager=strategy.prefill.kind == "eager")
    layer = LayerCache(strategy, facts, how, port, shared, constants, clock)
    layer.begin([prompt_len], total - prompt_len)
    chunk = strategy.prefill.chunk or prompt_len
    runs = []
    for start in range(0, prompt_len, chunk):
        stop = min(prompt_len, start + chunk)
        runs.append(layer.prefill(0, q[:, start:stop], k[:, start:stop], v[:, start:stop], final=stop == prompt_len))
    if layer.read.selects:
        layer.set_state(0, layer.read.finish_prefill([{n: t[0] for n, t in layer.state.items()}]))
    result = Replay(layer.kept_positions(), [], q.new_empty(total - prompt_len, heads, dim), torch.cat(runs))
    _note_scores(layer, result)
    covered, overlap = [], []
    for t in range(prompt_len, total):
        if hidden is not None:
            layer.foresee(hidden[t].view(1, 1, -1))
        result.output[t - prompt_len] = layer.step(q[None, :, t], k[None, :, t], v[None, :, t])[0]
        read = _read_positions(layer)
        result.read.append(read)
        if diagnose:
            share, same = _diagnose(q[:, t], k[:, : t + 1], read, facts.scale)
            covered.append(share)
            overlap.append(same)
        result.kept.append(layer.kept_positions()[0])
        _note_scores(layer, result)
    if diagnose and covered:
        result.covered, result.overlap = torch.stack(covered), torch.stack(overlap)
    return result


def _check(
    strategy: Strategy, q: Tensor, k: Tensor, v: Tensor, prompt_len: int, hidden: Tensor | None, w_q: Tensor | None
) -> None:
    if not all(isinstance(x, Tensor) for x in (q, k, v)) or not isinstance(prompt_len, int):
        kinds = ", ".join(type(x).__name__ for x in (q, k, v, prompt_len))
        raise UserError(f"replay wants three tensors and a whole prompt_len; got {kinds}")
    if strategy.read.calibration_text() is not None:
        raise UserError(f"'{strategy.name}' is calibrated on a text, which replay has no model to read with")
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[1:] != k.shape[1:] or q.shape[0] % k.shape[0]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise UserError(f"replay wants q [Hq, T, D] and k, v [H, T, D], Hq a multiple of H; got {shapes}")
    if not (q.is_floating_point() and q.dtype == k.dtype == v.dtype):
        raise UserError(f"replay wants q, k and v of one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not 1 <= prompt_len <= q.shape[1]:
        raise UserError(f"prompt_len must be 1 to {q.shape[1]} (the recorded tokens), not {prompt_len}")
    if strategy.read.foresees and (hidden is None or w_q is None):
        raise UserError(
            f"'{strategy.name}' speculates from the layer before: pass hidden= [T, hidden] and w_q= [Hq * D, hidden]"
        )
    if hidden is not None and (hidden.dim() != 2 or hidden.shape[0] < q.shape[1]):
        raise UserError(f"hidden= must be [T, hidden] for all {q.shape[1]} tokens, not {list(hidden.shape)}")
    if hidden is not None and w_q is not None and w_q.shape != (q.shape[0] * q.shape[2], hidden.shape[1]):
        want = [q.shape[0] * q.shape[2], hidden.shape[1]]
        raise UserError(f"w_q= must be [Hq * D, hidden], here {want}, not {list(w_q.shape)}")


def _constants(
    strategy: Strategy, facts: LayerFacts, port: RecordedPort, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Tensor]:
    """What calibration would find once a model in real use: here the recorded prompt stands for its text."""
    found: dict[str, Tensor] = {}
    if strategy.read.calibrates:
        found |= strategy.read.finish_calibration([strategy.read.calibrate(facts, q, k)])[0]
    if strategy.encode.calibrates:
        found |= strategy.encode.bind(facts, port, {}, {}).calibrate(facts, q, k, v, None, None)
    return found


def _read_positions(layer: LayerCache) -> Tensor | list[Tensor]:
    """True positions attended in the step just taken, sorted, ``[H, n]`` (a list where the heads differ in number)."""
    rows = []
    for h in range(layer.facts.kv_heads):
        rows.append(torch.cat([at[0, h, : int(count[0, h])] for at, count in layer.attended]).sort().values)
    return torch.stack(rows) if len({len(r) for r in rows}) == 1 else rows


def _note_scores(layer: LayerCache, result: Replay) -> None:
    if any(spec.name == "score" for spec in layer.columns):
        result.scores.append(layer.store.column("score")[0].gather(-1, layer.kept_slots(0)))


def _diagnose(q: Tensor, k: Tensor, read: Tensor | list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    heads, group = k.shape[0], q.shape[0] // k.shape[0]
    mass = torch.softmax((q.view(heads, group, -1).float() @ k.float().transpose(1, 2)) * scale, -1)  # [H, G, n]
    covered, overlap = [], []
    for h in range(heads):
        at = read[h]
        covered.append(mass[h, :, at].sum(-1))
        best = mass[h].mean(0).topk(len(at)).indices
        overlap.append(torch.isin(best, at).float().mean())
    return torch.cat(covered), torch.stack(overlap)
