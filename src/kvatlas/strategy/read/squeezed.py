"""Clusters of a context's keys (Squeezed Attention): a step reads those that a query could attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvatlas.attention.choose import best_slots
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Read
from kvatlas.strategy.budget import resolve, resolve_all
from kvatlas.strategy.read.kmeans import cluster, nearest
from kvatlas.strategy.read.slots import positions
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import Column, Combine, LayerFacts, Selection, View, fold

MOST = 2**15 - 1
"""Clusters of a KV head: a label is an int16, 0 standing for a token of no cluster, which is always read."""
ALWAYS = 1e6
"""Rank of such a token; above it, the later ones rank higher (positions up to 15 million are told apart)."""
NEAR = 1 - 1e-5
"""A share this near the threshold passes: a lone cluster's is the same for every query, but for rounding."""
JOINED = 8
"""Tokens at the end of a context that a tokenizer may give another shape when the prompt goes on."""


def shares(q: Tensor, centroids: Tensor, sizes: Tensor, scale: float) -> Tensor:
    """The share of attention that one key of each cluster would get, were all keys their clusters' centroids.

    Args:
        q: ``[B, H, G, D]``; centroids: ``[B, H, C, D]``; sizes: ``[B, H, C]`` (B may be 1 for both).

    Returns:
        ``[B, H, G, C]`` float32: exp(q c_i scale) / sum_j n_j exp(q c_j scale); 0 for empty clusters.
    """
    logits = torch.matmul(q.float(), centroids.float().transpose(-1, -2)).mul_(scale)
    sizes = sizes.unsqueeze(2)
    total = torch.logsumexp(logits + sizes.float().log(), dim=-1, keepdim=True)
    return torch.where(sizes > 0, (logits - total).exp_(), 0.0)


def group_keys(keys: Tensor, count: int, *, iterations: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cluster the keys of each KV head by their angles.

    Args:
        keys: ``[H, n, D]``, n at least 1.

    Returns:
        labels ``[H, n]`` int64; directions ``[H, count, D]`` float32 of length 1, by which labels were given; centroids
        ``[H, count, D]`` float32, the means of the raw keys; sizes ``[H, count]`` int64.
    """
    found = cluster(keys.unbind(0), [count] * len(keys), iterations=iterations, seed=seed, cosine=True)
    directions = torch.stack(found)
    labels = nearest(keys, directions, cosine=True)
    sizes = torch.zeros_like(directions[..., 0], dtype=torch.int64).scatter_add_(-1, labels, torch.ones_like(labels))
    at = labels.unsqueeze(-1).expand(-1, -1, keys.shape[-1])
    sums = torch.zeros_like(directions).scatter_add_(1, at, keys.float())
    return labels, directions, sums / sizes.clamp(min=1).unsqueeze(-1), sizes


def quantile(values: Tensor, share: float) -> Tensor:
    """The value below which ``share`` of ``values`` lies, never one above it; -1 for a share of 0 or no values."""
    if share == 0 or values.numel() == 0:
        return values.new_full((), -1.0)
    return values.flatten().kthvalue(max(1, int(share * values.numel()))).values


@dataclass(frozen=True)
class Squeezed(Read):
    """Keys of the clusters whose share of attention passes one threshold, and all that is in no cluster.

    The context (the prompt, or the text of ``context``) but its last ``recent`` tokens is clustered: k-means by angle,
    a share ``clusters`` of as many clusters, centroids the means of raw keys. A step reads the keys of all clusters
    with S_i = exp(q c_i / sqrt d) / sum_j n_j exp(q c_j / sqrt d) above the threshold, and all that is in no cluster:
    the context's last tokens and what comes later. The threshold is one for all layers and heads: the ``quantile`` of S
    over the queries of the context's last ``recent`` tokens. S of a group's query heads is combined (``gqa``). A
    prompt of ``recent`` tokens or fewer is read whole. With a budget no more than that is read, the best first.

    ``context`` is a UTF-8 text file that every prompt begins with. It is clustered once a model, and what was found is
    saved beside it. Without, every prompt is clustered when it has been read.

    Ours acts in decode only (the authors' also while the text after the context is prefilled); clusters have one level.
    """

    source: ClassVar[str] = "Squeezed Attention, 2024, sections 3 and 4"
    whole_prompt: ClassVar[bool] = True
    clusters: float = 0.05
    quantile: float = 0.9
    recent: int = 100
    gqa: Combine = "mean"
    context: str | None = None
    iterations: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.clusters <= 1:
            raise UserError(
                f"squeezed: clusters must be above 0 and at most 1 (a share of the context), not {self.clusters:g}"
            )
        if not 0 <= self.quantile < 1:
            raise UserError(f"squeezed: quantile must be 0 (read all) to below 1, not {self.quantile:g}")
        if self.recent < 1:
            raise UserError(f"squeezed: recent must be at least 1 token (its queries calibrate), not {self.recent}")
        if self.iterations < 1:
            raise UserError(f"squeezed: iterations must be at least 1, not {self.iterations}")
        if self.seed < 0:
            raise UserError(f"squeezed: seed must be 0 or more, not {self.seed}")
        if self.context is not None and not Path(self.context).is_file():
            raise UserError(f"squeezed: context={self.context} is not a file")

    @property
    def selects(self) -> bool:  # type: ignore[override]
        """Without a threshold and a budget everything is read, and nothing is clustered."""
        return self.quantile > 0 or self.budget != 1.0

    @property
    def calibrates(self) -> bool:  # type: ignore[override]
        """A context is clustered once a model."""
        return self.context is not None and self.selects

    def words(self) -> str:
        what = "the prompt" if self.context is None else self.context
        most = "" if self.budget == 1.0 else f", at most {self.budget:g}"
        return f"clusters of {what} above the {self.quantile:g} quantile, its last {self.recent} and later tokens{most}"

    def lossless(self) -> bool:
        return not self.selects

    def check(self, strategy: Strategy) -> None:
        if strategy.place.archives:
            raise UserError(f"'{strategy.name}': evicted tokens are in no cluster; read them by pages (quest)")

    def limit(self, length: int) -> int:
        return min(length, resolve(self.budget, length) or length)

    def clustered(self, length: int) -> int:
        """How many tokens of a context are clustered."""
        return max(0, length - self.recent)

    def count(self, tokens: int) -> int:
        """Clusters of so many tokens."""
        return min(MOST, max(1, int(self.clusters * tokens)))

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        return (Column("cluster", (), torch.int16),) if self.selects else ()

    def begin(self, facts: LayerFacts, slots: int) -> dict[str, Tensor]:
        if not self.selects or self.calibrates:
            return {}
        count, device = self.count(slots), facts.device
        return {
            "centroids": torch.zeros(facts.kv_heads, count, facts.head_dim, dtype=facts.dtype, device=device),
            "sizes": torch.zeros(facts.kv_heads, count, dtype=torch.int32, device=device),
            "queries": torch.zeros(facts.heads, self.recent, facts.head_dim, dtype=facts.dtype, device=device),
            "length": torch.zeros((), dtype=torch.int64, device=device),
            "threshold": torch.zeros((), dtype=torch.float32, device=device),
        }

    def state_bytes(self, facts: LayerFacts, slots: int) -> int:
        if not self.selects or self.calibrates:
            return 0
        key = facts.head_dim * facts.dtype.itemsize
        return facts.kv_heads * self.count(slots) * (key + 4) + facts.heads * self.recent * key + 12

    # ------------------------------------------------------------ a prompt of its own

    def observe_prefill(
        self, facts: LayerFacts, constants: Mapping[str, Tensor], q: Tensor, k: Tensor, so_far: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        return {} if not self.selects or self.calibrates else self._last_queries(facts, q, so_far)

    def _last_queries(self, facts: LayerFacts, q: Tensor, so_far: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The last queries ``[Hq, recent, D]``, scaled and at the end, and how long the prompt is so far."""
        length = q.shape[1] + (int(so_far["length"]) if so_far else 0)
        last = q[:, -self.recent :] * facts.scale
        if missing := self.recent - last.shape[1]:
            earlier = so_far["queries"][:, -missing:] if so_far else last.new_zeros(len(q), missing, q.shape[-1])
            last = torch.cat([earlier, last], 1)
        return {"queries": last, "length": torch.tensor(length, device=q.device)}

    def settle(self, view: View) -> None:
        """Clusters of a prompt, or the context's. A later turn changes nothing: it is read whole."""
        if view.keys is None:
            return
        known = view.constants if self.calibrates else {name: tensor[0] for name, tensor in view.state.items()}
        if not self.calibrates and bool(known["sizes"].any()):
            return
        keys, labels = view.keys()[0], view.column("cluster")[0]
        inside = (positions(view) < self.clustered(int(known["length"])))[0].expand_as(labels)
        together = not bool((inside != inside[:1]).any())  # an evicting rule may keep others in each head
        for heads in [slice(0, len(keys))] if together else [slice(h, h + 1) for h in range(len(keys))]:
            at = inside[heads][0].nonzero().squeeze(1)
            if len(at) == 0:
                continue
            if self.calibrates:
                found = nearest(keys[heads, at], known["directions"][heads], cosine=True)
            else:
                count = self.count(len(at))
                found, _, centroids, sizes = self._group(keys[heads, at], count)
                known["centroids"][heads, :count] = centroids.to(keys.dtype)
                known["sizes"][heads, :count] = sizes.int()
            labels[heads, at] = (found + 1).to(labels.dtype)

    def _group(self, keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return group_keys(keys, count, iterations=self.iterations, seed=self.seed)

    def finish_prefill(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {} if not states or not self.selects or self.calibrates else {"threshold": self._threshold(states)}

    def _threshold(self, states: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """One for all layers."""
        return quantile(torch.cat([self._calibration(state) for state in states]), self.quantile)

    def _calibration(self, state: Mapping[str, Tensor]) -> Tensor:
        """S of the context's last queries, over queries, KV heads and clusters that are not empty, flat."""
        length, heads = int(state["length"]), state["centroids"].shape[0]
        q = state["queries"][:, self.recent - (length - self.clustered(length)) :]
        grouped = q.unflatten(0, (heads, -1)).permute(2, 0, 1, 3)  # [queries, H, G, D]
        sizes = state["sizes"].unsqueeze(0)
        found = fold(shares(grouped, state["centroids"].unsqueeze(0), sizes, 1.0).flatten(1, 2), heads, self.gqa)
        return found[(sizes > 0).expand_as(found)]

    # ----------------------------------------------------------------- a fixed context

    def calibration(self) -> object:
        return replace(self, budget=1.0)

    def calibration_text(self) -> str | None:
        return _text_of(self.context) if self.calibrates and self.context is not None else None

    def calibrate(self, facts: LayerFacts, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        if facts.windowed:
            return {}
        last = self._last_queries(facts, q, {})
        inside = self.clustered(q.shape[1])
        count = self.count(inside)
        if inside == 0:
            raise UserError(
                f"squeezed: context={self.context} has recent={self.recent} tokens or fewer: none is left to cluster"
            )
        _, directions, centroids, sizes = self._group(k[:, :inside], count)
        return {**last, "directions": directions, "centroids": centroids.to(k.dtype), "sizes": sizes.int()}

    def finish_calibration(self, found: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        threshold = self._threshold([layer for layer in found if layer])
        kept = ("directions", "centroids", "sizes", "length")
        return [{**{n: layer[n] for n in kept}, "threshold": threshold} if layer else {} for layer in found]

    def calibration_file(self) -> tuple[str, dict[str, Any]] | None:
        """What decides about the clusters; the threshold is found anew each time."""
        assert self.context is not None
        return self.context, {name: getattr(self, name) for name in ("clusters", "recent", "iterations", "seed")}

    def check_prompt(self, ids: Sequence[int], calibrated_on: Sequence[int]) -> None:
        """A prompt's token ids must begin with the context's; where they meet, a tokenizer may have joined some."""
        needed = max(self.clustered(len(calibrated_on)), len(calibrated_on) - JOINED)
        if list(ids[:needed]) != list(calibrated_on[:needed]):
            raise UserError(f"squeezed: the prompt does not begin with the text of context={self.context}")

    # ------------------------------------------------------------------------ a step

    def select(self, view: View, q: Tensor, foreseen: Selection | None) -> Selection | None:
        if not self.selects:
            return None
        labels = view.column("cluster")
        known = view.state
        if self.calibrates:
            known = {name: view.constants[name].unsqueeze(0) for name in ("centroids", "sizes", "threshold")}
        heads = labels.shape[1]
        found = shares(q.unflatten(1, (heads, -1)), known["centroids"], known["sizes"], view.layer.scale)
        found = fold(found.flatten(1, 2), heads, self.gqa)
        found.masked_fill_(found < known["threshold"].view(-1, 1, 1) * NEAR, -1.0)
        rank = pad(found, (1, 0), value=ALWAYS).gather(-1, labels.long())
        empty = view.empty()
        if empty is not None:
            rank.masked_fill_(empty, -1.0)
        count = (rank >= 0).sum(-1)
        if self.budget != 1.0:
            count = count.minimum(resolve_all(self.budget, view.lengths))
            rank += positions(view) * (rank >= ALWAYS)
        scanned = labels.nbytes + known["centroids"].nbytes
        return Selection(best_slots(rank, count, int(count.max())), count, scanned)


def _text_of(context: str) -> str:
    """The text of a file, as it is; UserError when it cannot be read, is no UTF-8, or is empty."""
    try:
        text = Path(context).read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"squeezed: context={context} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"squeezed: context={context} cannot be read ({error.strerror})") from None
    if not text.strip():
        raise UserError(f"squeezed: context={context} is empty")
    return text


register(Preset("squeezed", {"read": Squeezed}, "reads the clusters of a fixed context that a query could attend to"))
