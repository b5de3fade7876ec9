"""What readers ask of slots."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.strategy.view import View


def positions(view: View) -> Tensor:
    """True positions of the slots, ``[B, H, n]`` or ``[1, 1, n]``: only a rule that evicts changes their order."""
    if "capacity" in view.plan:
        return view.column("pos")
    return torch.arange(view.width, device=view.lengths.device).view(1, 1, -1)
