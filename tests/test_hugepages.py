"""Large pages under a cache: asked for inside the tensor alone, and got where the system gives them."""

from __future__ import annotations

import sys
from pathlib import Path

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
        for start, size, _ in asked:
            assert start % hugepages.SIZE == size % hugepages.SIZE == 0 and size > 0
            assert made.data_ptr() <= start and start + size <= made.data_ptr() + made.nbytes
        assert len(asked) <= 1
        if made.nbytes >= 2 * hugepages.SIZE:  # then one lies inside, wherever the tensor begins
            assert asked


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="this system gives no large pages",
)
def test_a_store_lies_on_large_pages() -> None:
    made = hugepages.zeros((16 * hugepages.SIZE,), torch.uint8, torch.device("cpu"))
    inside, large = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low < made.data_ptr() + made.nbytes and high > made.data_ptr()
        elif inside and head == "AnonHugePages:":
            large += int(line.split()[1]) * 1024
    assert large >= 8 * hugepages.SIZE
