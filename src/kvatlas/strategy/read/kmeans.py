"""k-means for readers that group keys: many small problems at once, by faiss on the CPU; assignment by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvatlas.errors import UserError

TOLERANCE = 1e-4
"""Relative gain of an iteration below which k-means stops."""
BLOCK = 4096
"""Vectors assigned at a time."""


def cluster(
    problems: Sequence[Tensor], counts: Sequence[int], *, iterations: int, seed: int, cosine: bool = False
) -> list[Tensor]:
    """Centroids of each problem, solved by itself: k-means++ and Lloyd's iterations.

    Args:
        problems: ``[n, d]`` each, n at least 1; computed in float32.
        counts: clusters of each. Where there are fewer vectors, each is a centroid, the first one repeatedly.
        iterations: at most so many, fewer once an iteration gains less than 1e-4.
        cosine: by the angle instead of the distance; centroids then have length 1.

    Returns:
        ``[count, d]`` float32 each, on the problem's device. The same for the same vectors, whatever the number of
        threads.

    Raises:
        UserError: faiss is not installed.
    """

    def solve(problem: Tensor, count: int) -> Tensor:
        x = problem.detach().float()
        x = normalize(x, dim=-1) if cosine else x
        if len(x) <= count:
            return torch.cat([x, x[:1].expand(count - len(x), -1)])
        return torch.from_numpy(_train(x.cpu().numpy(), count, iterations, seed, cosine)).to(x.device)

    if all(len(x) <= count for x, count in zip(problems, counts)):
        return [solve(x, count) for x, count in zip(problems, counts)]
    faiss = _faiss()
    # A thread for each problem: they are too small to be divided. faiss has its own OpenMP: torch's is not touched.
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=lambda: faiss.omp_set_num_threads(1)) as pool:
        return list(pool.map(solve, problems, counts))


def _train(x: np.ndarray, count: int, iterations: int, seed: int, cosine: bool) -> np.ndarray:
    faiss = _faiss()
    means = faiss.Kmeans(
        x.shape[1], count, niter=iterations, seed=seed, spherical=cosine, early_stop_threshold=TOLERANCE,
        init_method=faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS, min_points_per_centroid=1,
        max_points_per_centroid=len(x),
    )  # fmt: skip
    means.train(x)
    return means.centroids


def nearest(x: Tensor, centroids: Tensor, *, cosine: bool = False) -> Tensor:
    """The nearest centroid of each vector: ``[..., n, d]`` and ``[..., k, d]`` -> ``[..., n]`` int64."""
    turned = centroids.float().transpose(-1, -2)
    if cosine:
        turned = normalize(turned, dim=-2)
    half = turned.square().sum(-2, keepdim=True).mul_(0.5)  # 0 apart from a constant where all have length 1
    parts = [torch.matmul(part.float(), turned).sub_(half).argmax(-1) for part in x.split(BLOCK, dim=-2)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            f"clustering keys needs faiss, which cannot be loaded ({error}): pip install faiss-cpu"
        ) from None
    return faiss
