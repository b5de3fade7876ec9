"""Greedy and seeded sampling for a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvatlas.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy.

    A sequence's draws depend on the seed and its place in the list of prompts, not on who shares the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 (greedy) or above, not {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p:g}")

    def draws(self, batch: int, steps: int, device: torch.device) -> Tensor | None:
        """``[batch, steps]`` uniform numbers, a row of its own per sequence; None when greedy."""
        if self.temperature == 0:
            return None
        rows = [torch.rand(steps, generator=torch.Generator().manual_seed(self.seed + b)) for b in range(batch)]
        return torch.stack(rows).to(device)

    def choose(self, logits: Tensor, draw: Tensor | None) -> Tensor:
        """Next tokens ``[B]`` from logits ``[B, V]``; ``draw [B]`` uniform."""
        if draw is None:
            return logits.argmax(-1)
        p, order = (logits.float() / self.temperature).softmax(-1).sort(-1, descending=True)
        before = p.cumsum(-1) - p
        p = p.masked_fill(before >= self.top_p, 0.0)  # the smallest set that reaches top_p; the best one always stays
        total = p.cumsum(-1)
        at = torch.searchsorted(total, (draw.unsqueeze(-1) * total[:, -1:]).contiguous(), right=True)
        return order.gather(-1, at.clamp(max=p.shape[-1] - 1)).squeeze(-1)
