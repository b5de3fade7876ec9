"""Large pages under a cache: asked for inside the tensor alone. Whether they come is the system's affair."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from kvatlas.strategy.place import hugepages


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for under Linux only")
def test_large_pages_lie_inside_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(hugepages, "_madvise", lambda: lambda *request: asked.append(request) or 0)
    for count in (1, hugepages.SIZE // 4, 3 * hugepages.SIZE // 4 + 1, 3_000_000):
        asked.clear()
        made = hugepages.zeros((count,), torch.float32, torch.device("cpu"))
        assert made.shape == (count,) and not made.any()
        for start, size, advice in asked:
            assert advice == mmap.MADV_HUGEPAGE
            assert start % hugepages.SIZE == size % hugepages.SIZE == 0 and size > 0
            assert made.data_ptr() <= start and start + size <= made.data_ptr() + made.nbytes
        assert len(asked) <= 1
        if made.nbytes >= 2 * hugepages.SIZE:  # then one lies inside, wherever the tensor begins
            assert asked
