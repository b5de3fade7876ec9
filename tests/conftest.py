"""Common to all tests: a fixed seed, hypothesis without surprises, and one thread.

The models here are so small that a second thread only waits (15 times as long on a busy machine). Tests of attention,
where threads share work, ask for two by ``kernels``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvatlas",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("kvatlas")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """The same random numbers in every test, whatever ran before; the threads that a test changed are put back."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=["plain", "native"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on plain PyTorch and on the native kernels (skipped where they are not to be had)."""
    from kvatlas.attention import fast

    torch.set_num_threads(2)
    if request.param == "plain":
        monkeypatch.setattr(fast, "serves", lambda q, k: False)
    elif not fast.serves(torch.zeros(1, 4, 16), torch.zeros(1, 2, 8, 16)):
        pytest.skip("the native kernels are not in use here")
    return request.param
