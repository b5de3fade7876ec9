"""From one attention to the next in one native call: the same as its separate operations, whoever shares the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_lean import causal
from test_native import library, threads  # noqa: F401 - fixtures
from tiny import tiny_model, tiny_prompts
from torch import Tensor

from kvatlas.attention import native
from kvatlas.attention.native import small
from kvatlas.model.lean import LeanDecoder

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels here: {native.why()}")
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5


def random_weights(hidden: int, attended: int, inner: int, width: int, dtype: torch.dtype) -> small.Weights:
    def matrix(n: int, k: int) -> Tensor:
        return (torch.randn(n, k) * k**-0.5).to(dtype)

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(hidden)).to(dtype)

    return small.Weights(
        matrix(hidden, attended),
        norm(),
        matrix(2 * inner, hidden),
        matrix(hidden, inner),
        norm(),
        matrix(width, hidden),
    )


def separately(w: small.Weights, seen: Tensor, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, ...]:
    """x, h and qkv by one call for each operation."""
    x = x + native.linear_small(seen, w.out)
    gate, up = native.linear_small(small.rms_norm(x, w.mlp_norm, EPS), w.gate_up).chunk(2, -1)
    x = x + native.linear_small((F.silu(gate) * up).contiguous(), w.down)
    h = small.rms_norm(x, w.norm, EPS)
    qkv = native.linear_small(h, w.qkv)
    small.rope_(qkv.view(len(x), -1, cos.shape[-1])[:, :heads], cos, sin)
    return x, h, qkv


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hidden", "attended", "inner", "dim"),
    [(64, 64, 160, 16), (576, 576, 1536, 64), (40, 96, 56, 8), (136, 64, 72, 32)],
)
def test_between_is_its_separate_operations(
    hidden: int, attended: int, inner: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    w = random_weights(hidden, attended, inner, 5 * dim, dtype)
    seen, x = torch.randn(16, attended).to(dtype), torch.randn(16, hidden).to(dtype)
    cos, sin = torch.randn(2, 16, 1, dim).to(dtype)
    expected = separately(w, seen, x, cos, sin, 3)
    followed = x.clone()
    h, qkv = small.between(w, seen, followed, cos, sin, 3, EPS)
    tolerance = {"atol": 2e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 2**-6}
    for got, want in zip((followed, h, qkv), expected):
        torch.testing.assert_close(got, want, **tolerance)
    for rows in (1, 3):
        alone = x[:rows].clone()
        some = small.between(w, seen[:rows], alone, cos[:rows], sin[:rows], 3, EPS)
        for got, whole in zip((alone, *some), (followed, h, qkv)):
            assert torch.equal(got, whole[:rows])


def test_after_the_last_layer_only_the_residual_follows() -> None:
    torch.manual_seed(0)
    w = random_weights(64, 64, 160, 80, torch.float32)
    seen, x = torch.randn(2, 3, 64)
    cos, sin = torch.randn(2, 3, 1, 16)
    expected = separately(w, seen, x, cos, sin, 3)[0]
    assert small.between(w._replace(norm=None, qkv=None), seen, x, cos, sin, 3, EPS)[1].numel() == 0
    torch.testing.assert_close(x, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("extreme", [-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, float("nan")])
def test_silu_of_extremes(extreme: float) -> None:
    hidden = 8
    eye, zeros = torch.eye(hidden), torch.zeros(hidden, hidden)
    # the norm gives ones, so the gate is `extreme` and up is 1
    w = small.Weights(zeros, torch.ones(hidden), torch.cat((eye * extreme, eye)), eye, None, None)
    x, cos = torch.ones(1, hidden), torch.zeros(1, 1, 8)
    small.between(w._replace(mlp_norm=torch.full((hidden,), 1 + EPS / 2)), torch.zeros(1, hidden), x, cos, cos, 0, EPS)
    want = 1 + F.silu(torch.full((1, hidden), extreme)) if extreme == extreme else torch.full((1, hidden), torch.nan)
    torch.testing.assert_close(x, want, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_decoder_is_the_same_with_and_without(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(arch)
    ids, _ = tiny_prompts((4, 4))
    positions = torch.arange(4).expand(2, -1)
    calls = []
    between = small.between
    monkeypatch.setattr(small, "between", lambda *args: calls.append(1) or between(*args))
    monkeypatch.setattr(small, "fuses", lambda: True)
    fused = LeanDecoder(model)(ids, positions, causal)
    plain = arch in ("llama", "mistral")  # the others have biases or norms of heads in between
    assert len(calls) == (model.config.num_hidden_layers if plain else 0)
    monkeypatch.setattr(small, "fuses", lambda: False)
    torch.testing.assert_close(LeanDecoder(model)(ids, positions, causal), fused, atol=1e-5, rtol=0)


def test_wrong_tensors_are_refused() -> None:
    w = random_weights(64, 64, 160, 80, torch.float32)
    seen, x = torch.randn(2, 3, 64)
    cos, sin = torch.randn(2, 3, 1, 16)
    for changed in ({"down": w.down.T}, {"out": w.out[:32]}, {"gate_up": w.gate_up.bfloat16()}):
        with pytest.raises(AssertionError):
            small.between(w._replace(**changed), seen, x, cos, sin, 3, EPS)
    with pytest.raises(AssertionError):
        small.between(w, seen.repeat(6, 1), x, cos, sin, 3, EPS)
