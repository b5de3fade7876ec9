"""Saved caches: what is loaded goes on exactly as what was saved; anything else is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from specs import ALL, lm_of, padded, prompts
from tiny import tiny_model

import kvatlas
from kvatlas.engine import saved
from kvatlas.engine.cache import KVCache
from kvatlas.engine.lm import LM
from kvatlas.engine.tensorfile import FORMAT, part_of, write_tensors
from kvatlas.errors import UserError
from kvatlas.strategy.registry import presets
from kvatlas.strategy.spec import parse

RAGGED = (40, 23, 31)
COMPOSED = (
    "h2o:0.3+int4",
    "h2o:0.3+int8+host",
    "snapkv:0.3+quest:0.5",
    "streaming:0.3,positions=true+quest:0.3",
    "infinigen:0.2+int4",
    "quest:0.2+paged",
    "h2o:0.4,layers=pyramid",
    "scissorhands:0.3,prefill=chunked:8",
    "streaming:0.3+host",
    "recall:0.3+int8",
    "recall:0.3,archive_as=int4,pages=1,page=4",
    "infllm:init=4,local=8,block=4,topk=2,repr=2",
    "squeezed:recent=8,clusters=0.3,quantile=0.5",
    "pqcache:0.3,sinks=2",
    "quest:0.2,page=4+disk",
    "h2o:0.3+disk",
)


def every() -> list[str]:
    """The matrix's strategies, every other preset at a budget that tells, and compositions."""
    known = {part.split(":")[0] for spec in ALL for part in spec.split("+")}
    others = [f"{name}:0.3" if preset.budgeted else name for name, preset in presets().items() if name not in known]
    return [*ALL, *others, *COMPOSED]


def steps(lm: LM, cache: KVCache, token: torch.Tensor, n: int) -> torch.Tensor:
    """Logits ``[n, B, V]`` of greedy steps."""
    out = []
    for _ in range(n):
        out.append(lm.step(cache, token))
        token = out[-1].argmax(-1)
    return torch.stack(out)


def held(lm: LM, spec: str, ids: list[list[int]], n: int = 4) -> tuple[KVCache, torch.Tensor]:
    """A cache in the middle of its decode, and the tokens that come next."""
    cache = lm.new_cache(spec)
    token = lm.prefill(cache, ids, reserve=3).argmax(-1)
    return cache, steps(lm, cache, token, n)[-1].argmax(-1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A saved cache of a tiny model."""
    cache, _ = held(lm_of("llama"), "h2o:0.3", prompts(20))
    kvatlas.save_cache(cache, tmp_path / "context.kv")
    return tmp_path / "context.kv"


# ------------------------------------------------------------------------- it goes on


@pytest.mark.parametrize("spec", every())
def test_a_loaded_cache_goes_on_exactly(spec: str, tmp_path: Path) -> None:
    """Tokens and logits are those of the cache that was saved, and saving changed nothing there."""
    goes_on(spec, RAGGED, tmp_path / "x")


@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "infinigen:0.2,pool=0.5", "recall:0.3", "paged", *COMPOSED[:3]])
def test_a_batch_of_one_goes_on_exactly(spec: str, tmp_path: Path) -> None:
    goes_on(spec, RAGGED[:1], tmp_path / "x")


def goes_on(spec: str, lengths: tuple[int, ...], file: Path) -> None:
    """A cache that was saved, loaded, copied, and one that was left alone: eight steps of each."""
    lm, ids = lm_of("llama"), prompts(*lengths)
    cache, token = held(lm, spec, ids)
    other, same = held(lm, spec, ids)
    kvatlas.save_cache(cache, file)
    loaded = kvatlas.load_cache(file, lm)
    copied = saved.copy(cache)
    want = steps(lm, other, same, 8)
    for made in (cache, loaded, copied):
        assert torch.equal(steps(lm, made, token, 8), want)
        assert made.strategy == parse(spec) and made.seen.tolist() == other.seen.tolist()
        for mine, its in zip(made.layers, other.layers):
            assert torch.equal(mine.store.lengths, its.store.lengths)
            assert mine.held_tokens() == its.held_tokens() and mine.prompts == its.prompts


@pytest.mark.parametrize("arch", ["gemma3", "gpt_oss", "opt", "qwen3"])
@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "infinigen:0.2", "snapkv:0.3+quest:0.5", "paged"])
def test_layers_with_windows_and_other_architectures(arch: str, spec: str, tmp_path: Path) -> None:
    lm = lm_of(arch)
    cache, token = held(lm, spec, prompts(*RAGGED))
    kvatlas.save_cache(cache, tmp_path / "x")
    assert torch.equal(
        steps(lm, kvatlas.load_cache(tmp_path / "x", lm), token, 8), steps(lm, cache, token, 8)
    )  # fmt: skip


@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "snapkv:0.3", "quest:0.3", "recall:0.3", "infinigen:0.2", "paged"])
def test_later_turns_of_a_loaded_cache(spec: str, tmp_path: Path) -> None:
    """A run of tokens after loading, and all that the rules do at its end."""
    lm, turn = lm_of("llama"), prompts(30, seed=9)[0]
    cache, _ = held(lm, spec, prompts(*RAGGED))
    kvatlas.save_cache(cache, tmp_path / "x")
    loaded = kvatlas.load_cache(tmp_path / "x", lm, reserve=1)
    first = [torch.cat([lm.extend(c, row, turn[: 10 * (row + 1)]) for row in range(3)]) for c in (cache, loaded)]
    assert torch.equal(*first)
    assert torch.equal(*[steps(lm, c, first[0].argmax(-1), 6) for c in (cache, loaded)])


def test_bfloat16(tmp_path: Path) -> None:
    lm = lm_of("llama", torch.bfloat16)
    for spec in ("full", "h2o:0.3", "int4", "infinigen:0.2"):
        cache, token = held(lm, spec, prompts(*RAGGED))
        kvatlas.save_cache(cache, tmp_path / "x")
        loaded = kvatlas.load_cache(tmp_path / "x", lm)
        assert torch.equal(steps(lm, loaded, token, 5), steps(lm, cache, token, 5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "paged", "host", "infinigen:0.2", "recall:0.3", "snapkv:0.3+int4"])
def test_on_a_gpu_and_from_there_to_a_cpu(spec: str, tmp_path: Path) -> None:
    lm = LM(tiny_model("llama").to("cuda"))
    cache, token = held(lm, spec, prompts(*RAGGED))
    kvatlas.save_cache(cache, tmp_path / "x")
    loaded = kvatlas.load_cache(tmp_path / "x", lm)
    assert torch.equal(steps(lm, loaded, token, 5), steps(lm, cache, token, 5))
    here = lm_of("llama")
    moved = kvatlas.load_cache(tmp_path / "x", here)
    assert bool(torch.isfinite(steps(here, moved, token.cpu(), 5)).all())


def test_right_after_the_prompt_and_after_rows_were_dropped(tmp_path: Path) -> None:
    lm = lm_of("llama")
    for spec in ("full", "h2o:0.3", "paged", "infinigen:0.3"):
        cache = lm.new_cache(spec)
        token = lm.prefill(cache, prompts(*RAGGED), reserve=8).argmax(-1)
        cache.select_rows([2, 0])
        kvatlas.save_cache(cache, tmp_path / "x")
        loaded = kvatlas.load_cache(tmp_path / "x", lm)
        assert torch.equal(steps(lm, loaded, token[[2, 0]], 5), steps(lm, cache, token[[2, 0]], 5))


def test_nothing_is_calibrated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, token = held(lm_of("llama"), "infinigen:0.2", prompts(20))
    kvatlas.save_cache(cache, tmp_path / "x")
    fresh = LM(tiny_model("llama"))
    monkeypatch.setattr(LM, "constants", lambda *_: pytest.fail("calibrated"))
    loaded = kvatlas.load_cache(tmp_path / "x", fresh)
    assert torch.equal(steps(fresh, loaded, token, 5), steps(lm_of("llama"), cache, token, 5))


@pytest.mark.parametrize("spec", ["full", "h2o:0.3"])
def test_a_cache_for_generate(spec: str, tmp_path: Path) -> None:
    """One's own transformers code, padded batch and all, goes on after loading as it would have."""
    model, ids = tiny_model("llama"), padded(prompts(*RAGGED[:2]))
    cache = kvatlas.cache(spec, model)
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
    out = model.generate(**ids, **options, cache=cache)
    kvatlas.save_cache(cache, tmp_path / "x")
    more = {"input_ids": out, "attention_mask": torch.cat([ids["attention_mask"], torch.ones(2, 6).long()], 1)}
    want = model.generate(**more, **options, cache=cache)
    loaded = kvatlas.load_cache(tmp_path / "x", model)
    assert torch.equal(model.generate(**more, **options, cache=loaded), want)
    plain, _ = held(lm_of("llama"), spec, prompts(9))
    kvatlas.save_cache(plain, tmp_path / "y")
    with pytest.raises(UserError, match="saved from an LM's cache"):
        kvatlas.load_cache(tmp_path / "y", model)


# ------------------------------------------------------------------------- the file


def test_the_file_is_plain_safetensors(file: Path) -> None:
    """Any safetensors reader opens it; every tensor begins at a multiple of 8; the header says what it is."""
    with safe_open(str(file), "pt") as opened:
        about = json.loads(opened.metadata()["kvatlas"])
        assert about["format"] == FORMAT and about["strategy"] == "h2o:0.3"
        assert about["prompts"] == [20] and about["seen"] == [24] and about["model"]["layers"] == 4
        assert opened.get_tensor("0.kept.0.k").shape == (2, 7, 16)
        assert opened.get_tensor("3.plan.capacity").tolist() == [6]
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    starts = [
        entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__" and "pad" not in name
    ]
    assert len(starts) > 20 and not any(start % 8 for start in starts)
    assert file.stat().st_mode & 0o077 == (0o666 & ~_umask()) & 0o077


def _umask() -> int:
    import os

    now = os.umask(0)
    os.umask(now)
    return now


def test_a_sequences_length_decides_the_size(tmp_path: Path) -> None:
    """Room that is not filled is not written."""
    lm = lm_of("llama")
    cache = lm.new_cache("full")
    lm.prefill(cache, prompts(32), reserve=5000)
    kvatlas.save_cache(cache, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 4 * 2 * 32 * 2 * 16 * 4 + 8000


def test_a_failed_write_leaves_what_was_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, lm = file.read_bytes(), lm_of("llama")
    cache, _ = held(lm, "full", prompts(30))
    fails = iter([False] * 20 + [True])
    own = type(cache.layers[0].store).row_columns

    def row_columns(store: object, row: int) -> object:
        if next(fails, True):
            raise OSError(28, "No space left on device")
        return own(store, row)

    with monkeypatch.context() as patched:
        patched.setattr(type(cache.layers[3].store), "row_columns", row_columns)
        fails = iter([False, False, False, True])
        with pytest.raises(UserError, match="cannot be written \\(No space left on device\\)"):
            kvatlas.save_cache(cache, file)
    assert file.read_bytes() == before and [p.name for p in file.parent.iterdir()] == [file.name]
    kvatlas.save_cache(cache, file)
    assert kvatlas.load_cache(file, lm).strategy.name == "full"


def test_it_is_written_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are asked for when their turn comes, and each layer's once."""
    lm, asked = lm_of("llama"), []
    cache, _ = held(lm, "paged", prompts(*RAGGED))
    own = type(cache.layers[0].store).row_columns
    monkeypatch.setattr(
        type(cache.layers[0].store), "row_columns", lambda s, row: asked.append((id(s), row)) or own(s, row)
    )
    kvatlas.save_cache(cache, tmp_path / "x")
    assert asked == [(id(layer.store), row) for layer in cache.layers for row in range(3)]


# ----------------------------------------------------------------------------- errors


def refused(path: Path, lm: LM | None = None) -> str:
    with pytest.raises(UserError) as caught:
        kvatlas.load_cache(path, lm or lm_of("llama"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_not_a_file_of_ours(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "none")
    assert "cannot be read" in refused(tmp_path)
    for content in (b"", b"hello", b"x" * 5000, b"PK\x03\x04" * 9):
        (tmp_path / "x").write_bytes(content)
        assert "is not a file that kvatlas saved" in refused(tmp_path / "x")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3)}, str(tmp_path / "y"), {"made": "elsewhere"})
    assert "is not a file that kvatlas saved" in refused(tmp_path / "y")
    write_tensors(tmp_path / "z", [part_of({"a": torch.zeros(3)})], {"kind": "calibration"})
    assert "is a file of kvatlas, and holds no cache" in refused(tmp_path / "z")


def test_a_damaged_file(file: Path) -> None:
    raw = file.read_bytes()
    for cut in (len(raw) - 1, len(raw) // 2, 300, 60):
        file.write_bytes(raw[:cut])
        assert "is damaged" in refused(file), cut
    file.write_bytes(raw + b"more")
    assert "is damaged" in refused(file)
    for broken in (raw.replace(b'"data_offsets"', b'"data_offsetz"'), raw.replace(b"F32", b"F99")):
        file.write_bytes(broken)
        assert "is damaged" in refused(file)


def test_a_newer_format(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b'\\"format\\": 1', b'\\"format\\": 9'))
    assert "is of format 9, and this kvatlas reads formats up to 1" in refused(file)


def test_another_model(file: Path) -> None:
    assert "made with model llama, and this one is qwen3" in refused(file, lm_of("qwen3"))
    assert "made with model with layers 4" in refused(file, LM(tiny_model("llama", num_hidden_layers=3)))
    assert "made with dtype float32, and this one is bfloat16" in refused(file, lm_of("llama", torch.bfloat16))
    assert "other weights or positions" in refused(file, LM(tiny_model("llama", seed=5)))
    turned = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert "other weights or positions" in refused(file, LM(turned))
    assert kvatlas.load_cache(file, LM(tiny_model("llama"), lean=False)).seen.tolist() == [24], "the same one anew"


def test_a_changed_weight_is_another_model(file: Path) -> None:
    model = tiny_model("llama")
    model.model.layers[2].mlp.down_proj.weight.mul_(1.01)
    assert "other weights" in refused(file, LM(model))


def test_columns_of_another_version(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"2.kept.0.score", b"2.kept.0.scorf"))
    assert "lacks '2.kept.0.score'" in refused(file)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    lm = lm_of("llama")
    with pytest.raises(UserError, match="holds nothing yet"):
        kvatlas.save_cache(lm.new_cache("full"), tmp_path / "x")
    cache = lm.new_cache("h2o:0.3,prefill=chunked:8")
    cache.begin([20], 4)
    lm.extend(cache, 0, prompts(20)[0][:8], final=False)
    with pytest.raises(UserError, match="not all in the cache yet"):
        kvatlas.save_cache(cache, tmp_path / "x")
    full, _ = held(lm, "full", prompts(9))
    with pytest.raises(UserError, match=r"cannot be written \(No such file"):
        kvatlas.save_cache(full, tmp_path / "no" / "x")
    with pytest.raises(UserError, match="cannot be written"):
        kvatlas.save_cache(full, tmp_path)
    from dataclasses import replace

    mine = replace(parse("h2o:0.3"), keep=replace(parse("h2o:0.3").keep, sinks=2))
    odd, _ = held(lm, mine, prompts(9))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is not what this name stands for"):
        kvatlas.save_cache(odd, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="reserve must be at least 1"):
        kvatlas.load_cache(tmp_path / "x", lm, reserve=0)
