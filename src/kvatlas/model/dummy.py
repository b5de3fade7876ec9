"""Real architectures with random weights: for speed and memory at sizes whose weights are not at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvatlas.errors import UserError, nearest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ANY_POSITIONS = 1 << 24  # random weights were trained at no position, so none is beyond them

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _shape(
    kind: str, layers: int, hidden: int, inner: int, heads: tuple[int, int, int], vocab: int, **more: Any
) -> dict[str, Any]:
    """One row of the table; `heads` is (query heads, KV heads, head size)."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab,
        **more,
    }


def _rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


SHAPES: dict[str, dict] = {
    "smollm2": _shape(
        "llama", 30, 576, 1536, (9, 3, 64), 49152,
        max_position_embeddings=8192, rope_parameters=_rope(100000.0), tie_word_embeddings=True, rms_norm_eps=1e-5,
    ),
    "llama-3.1-8b": _shape(
        "llama", 32, 4096, 14336, (32, 8, 128), 128256,
        max_position_embeddings=131072, rope_parameters={**LLAMA3_ROPE, "factor": 8.0},
        tie_word_embeddings=False, rms_norm_eps=1e-5,
    ),
    "llama-3.2-1b": _shape(
        "llama", 16, 2048, 8192, (32, 8, 64), 128256,
        max_position_embeddings=131072, rope_parameters={**LLAMA3_ROPE, "factor": 32.0},
        tie_word_embeddings=True, rms_norm_eps=1e-5,
    ),
    "qwen3-0.6b": _shape(
        "qwen3", 28, 1024, 3072, (16, 8, 128), 151936,
        max_position_embeddings=40960, rope_parameters=_rope(1000000.0), tie_word_embeddings=True, rms_norm_eps=1e-6,
    ),
    "mistral-7b": _shape(
        "mistral", 32, 4096, 14336, (32, 8, 128), 32768,
        max_position_embeddings=32768, rope_parameters=_rope(1000000.0), tie_word_embeddings=False,
        rms_norm_eps=1e-5, sliding_window=None,
    ),
    "gpt-oss-20b": _shape(
        "gpt_oss", 24, 2880, 2880, (64, 8, 64), 201088,
        max_position_embeddings=131072, rope_parameters=YARN_ROPE, tie_word_embeddings=False, rms_norm_eps=1e-5,
        num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
    ),
}  # fmt: skip


def dummy_model(
    name: str, dtype: torch.dtype, device: torch.device, seed: int = 0, layers: int | None = None
) -> PreTrainedModel:
    """The architecture called `name` with weights drawn from `seed`, directly in `dtype` on `device`.

    `layers` overrides the number of layers. Raises UserError for an unknown name, a bad number of layers, or when the
    weights do not fit into the free memory.
    """
    if name not in SHAPES:
        raise UserError(f"no shape called '{name}' for load_format=dummy; {nearest(name, SHAPES)}")
    if layers is not None and layers < 1:
        raise UserError(f"layers must be 1 or more, not {layers}")
    return random_model(_config(SHAPES[name], layers), dtype, device, seed, label=name)


def random_model(
    config: Any, dtype: torch.dtype, device: torch.device, seed: int = 0, label: str = "model"
) -> PreTrainedModel:
    """A model of `config` with cheap random weights, of the same spread as a fresh initialisation."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"):
        need = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()) * dtype.itemsize
    _check_room(label, need, device)
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    fill(model, seed, config.initializer_range)
    model.config.max_position_embeddings = ANY_POSITIONS
    return model


def fill(model: PreTrainedModel, seed: int, spread: float) -> None:
    """Give every weight values of N(0, spread^2); norms keep theirs. One block of noise serves all, from another start.

    A copy of a block costs what the memory's bandwidth allows; drawing billions of normals takes minutes.
    """
    import torch

    weights = dict(model.named_parameters())
    norms = {id(p) for m in model.modules() if "Norm" in type(m).__name__ for p in m.parameters()}
    first = next(iter(weights.values()))
    noise = torch.randn(1_048_583, generator=torch.Generator().manual_seed(seed)) * spread  # a prime, so rows differ
    noise = noise.to(dtype=first.dtype, device=first.device)
    with torch.no_grad():
        for number, weight in enumerate(weights.values()):
            if id(weight) not in norms:
                _tile(weight.view(-1), noise.roll(7919 * number))


def _tile(flat: torch.Tensor, noise: torch.Tensor) -> None:
    """Repeat `noise` [P] over `flat` [n]."""
    whole = flat.numel() // noise.numel() * noise.numel()
    flat[:whole].view(-1, noise.numel()).copy_(noise)
    flat[whole:].copy_(noise[: flat.numel() - whole])


def _config(shape: dict, layers: int | None) -> Any:
    from transformers import AutoConfig

    values = dict(shape)
    if layers is not None:
        values["num_hidden_layers"] = layers
    kind = values.pop("model_type")
    rope = dict(values.pop("rope_parameters"))
    return AutoConfig.for_model(kind, rope_parameters=rope, bos_token_id=1, eos_token_id=2, pad_token_id=2, **values)


def _check_room(name: str, need: int, device: torch.device) -> None:
    """Refuse what would be killed for memory: the weights alone must fit into what is free now."""
    import psutil
    import torch

    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if need > free:
        raise UserError(
            f"the weights of {name} need {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on {device}; "
            "use dtype=bfloat16 or fewer layers (layers=N)"
        )
