"""Texts and the prompts cut from them."""

from __future__ import annotations

import pytest

from kvatlas.errors import UserError
from kvatlas.workload.text import Text, default_text, file_text, prompts, random_prompts


class Words:
    """A tokenizer of words."""

    bos_token_id = 1

    def __init__(self, start=False):
        self.start = start

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [10 + len(word) for word in text.split()]
        return {"input_ids": [1, *ids] if self.start and add_special_tokens else ids}


def test_default_text_is_prose_and_the_same_each_time():
    text = default_text()
    assert text == default_text() and len(text.text) > 150_000
    assert "::=" not in text.text and ">>>" not in text.text
    paragraphs = text.text.strip().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


def test_calibration_is_never_scored():
    text = default_text()
    calibration, scored = text.split()
    assert scored.text + calibration.text == text.text
    assert 0.15 < len(calibration.text) / len(text.text) < 0.25
    assert not set(calibration.text.strip().split("\n\n")) & set(scored.text.strip().split("\n\n"))
    assert len({calibration.sha256, scored.sha256, text.sha256}) == 3
    with pytest.raises(UserError, match="between 0 and 1"):
        text.split(1.5)
    with pytest.raises(UserError, match="too few"):
        Text("x", "small").split()


def test_prompts_have_exact_counts_and_do_not_overlap():
    text = Text(" ".join("w" * (1 + i % 7) for i in range(100)), "words")
    ids = Words()(text.text)["input_ids"]
    made = prompts(Words(), text, n=3, tokens=20, new_tokens=5, offset=10)
    assert [p.start for p in made] == [10, 35, 60]
    assert list(made[1].ids) == ids[35:55] and list(made[1].continuation) == ids[55:60]
    with_start = prompts(Words(start=True), text, n=1, tokens=20, new_tokens=5)[0]
    assert with_start.ids[0] == 1 and len(with_start.ids) == 20 and list(with_start.ids[1:]) == ids[:19]
    assert list(with_start.continuation) == ids[19:24]
    spread = prompts(Words(), text, n=5, tokens=60, new_tokens=5, overlap=True)
    assert [p.start for p in spread] == [0, 8, 16, 24, 32] and all(len(p.ids) == 60 for p in spread)


def test_prompts_that_do_not_fit_say_the_numbers():
    text = Text("a b c d e", "words")
    with pytest.raises(UserError, match=r"has 5 tokens, and 2 prompts of 3 \+ 0 tokens need 6"):
        prompts(Words(), text, n=2, tokens=3)
    with pytest.raises(UserError, match="number of tokens must be 1 or more"):
        prompts(Words(), text, n=2, tokens=0)


def test_random_prompts():
    made = random_prompts(256, n=2, tokens=10, new_tokens=3, seed=5)
    assert made == random_prompts(256, n=2, tokens=10, new_tokens=3, seed=5)
    assert all(len(p.ids) == 10 and len(p.continuation) == 3 and min(p.ids) >= 3 and max(p.ids) < 256 for p in made)


def test_file_text(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("\ufeffHello, wörld.", encoding="utf-8")
    assert file_text(file).text == "Hello, wörld." and file_text(file).name == "a.txt"
    file.write_text("  \n")
    with pytest.raises(UserError, match="is empty"):
        file_text(file)
    file.write_bytes(b"abc\xff\xfe")
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 3\)"):
        file_text(file)
    with pytest.raises(UserError, match="is a folder"):
        file_text(tmp_path)
    with pytest.raises(UserError, match="no file"):
        file_text(tmp_path / "none.txt")
