"""Tiny models saved as folders, with a tokenizer of bytes; the command run in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvatlas.cli import main as cli

VOCAB = 259  # 256 bytes, <s>, </s>, <pad>
SMALL = ("--prompt-tokens", "48", "--new-tokens", "5", "--batch", "2", "--threads", "1", "--dtype", "float32")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save(folder: Path, model: PreTrainedModel) -> Path:
    """The model and the tokenizer as a folder."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_folder(folder: Path, arch: str = "llama", **config: Any) -> Path:
    """A tiny random model of `tiny.ARCHS` as a folder."""
    return save(folder, tiny_model(arch, **{"vocab_size": VOCAB, "max_position_embeddings": 2048, **config}))


def text_file(path: Path, words: int = 6000) -> Path:
    """A text that does not repeat itself."""
    path.write_text(" ".join(f"word{i * 7919 % 9973}" + "." * (i % 11 == 0) for i in range(words)), encoding="utf-8")
    return path


def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvatlas", *map(str, arguments)])
        capfd.readouterr()
        code = cli._run()
        out = capfd.readouterr()
        return code, out.out, out.err

    return call


def command(*arguments: object) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "kvatlas.cli.main", *map(str, arguments)]


def apart(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240, env=environment, **options)
