"""What the tests of several readers share: queries and keys about few themes, and forks that part."""

from __future__ import annotations

import torch
from specs import lm_of, prompts
from test_stores import started, steps
from torch import Tensor

HEADS, GROUP, DIM = 2, 3, 16


def themed(n: int, seed: int = 0, *, themes: float = 1.5, noise: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[.., n, D]`` about few themes: near keys of the query's theme matter."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(HEADS, 12, DIM, generator=draw) * themes
    of = torch.randint(0, 12, (n,), generator=draw)
    k = centres[:, of] + torch.randn(HEADS, n, DIM, generator=draw) * noise
    q = centres[:, of.roll(7)].repeat_interleave(GROUP, 0)
    q = q + torch.randn(HEADS * GROUP, n, DIM, generator=draw) * noise
    return q, k, torch.randn(HEADS, n, DIM, generator=draw)


def check_forks_part(spec: str) -> None:
    """Rows that were repeated go on as each would alone, whatever they are fed."""
    lm, ids = lm_of("llama"), prompts(40, 23)
    cache, first = started(lm, spec, ids)
    steps(lm, cache, first, 3)
    cache.select_rows([0, 1, 0])
    fed = torch.tensor([7, 8, 9])
    together = steps(lm, cache, fed, 20)
    for row, source in enumerate((0, 1, 0)):
        alone, again = started(lm, spec, ids)
        steps(lm, alone, again, 3)
        alone.select_rows([source])
        assert steps(lm, alone, fed[row : row + 1], 20)[0] == together[row]
