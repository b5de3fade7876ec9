"""Needles, key-value pairs, lines and topics: where the item lies, what is asked, how an answer is judged."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sentences import replied, sentences_lm

from kvatlas.errors import UserError
from kvatlas.quality.generated import generated_task
from kvatlas.quality.question import Question
from kvatlas.quality.retention.facts import own

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not (DATA / "gutenberg_moby_dick").is_dir(), reason="the benchmark data are not here")
HIDDEN = ("needle", "keyvalue", "lines")
ALL = (*HIDDEN, "topics")


def asked(name: str, limit: int = 10, seed: int = 0, **options: Any) -> list[Question]:
    return generated_task(name, **options).questions(sentences_lm(), limit, seed)  # type: ignore[attr-defined]


def text_of(tokens: tuple[int, ...]) -> str:
    return sentences_lm().tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("name", ALL)
def test_a_sample_depends_on_its_number_and_the_seed_alone(name: str) -> None:
    many = asked(name, 8, tokens="256,600")
    assert asked(name, 3, tokens="256,600") == many[:3]
    assert len({q.labels["value"] for q in many}) >= 5
    other = asked(name, 8, seed=1, tokens="256,600")
    assert [q.name for q in other] == [q.name for q in many] and other != many


@pytest.mark.parametrize("name", ALL)
def test_spread_over_lengths_and_depths_within_tolerance(name: str) -> None:
    questions = asked(name, 20, tokens="256,600,1000,2000")
    lengths = [256, 600, 1000, 2000] * 5
    for question, wanted in zip(questions, lengths):
        assert wanted - 60 <= len(question.context) <= wanted + 8
        assert question.labels["context_tokens"] == len(question.context)
    cells = Counter((n, q.labels["depth"]) for n, q in zip(lengths, questions))
    if name in HIDDEN:
        assert len(cells) == 20 and set(cells.values()) == {1}
    else:
        assert set(cells.values()) == {5} and {q.labels["depth"] for q in questions} == {"0%"}


@pytest.mark.parametrize("name", HIDDEN)
def test_the_item_lies_at_its_depth_and_the_answer_is_primed_with_its_words(name: str) -> None:
    lm = sentences_lm()
    for question in asked(name, 10, tokens="400,900"):
        context, value = text_of(question.context), str(question.labels["value"])
        lead = text_of(question.after).split("\n")[-1].removeprefix("Answer: ").strip()
        assert context.count(value) == 1
        at = context.index(lead + " " + value if name == "needle" else lead + value)
        assert len(lm.tokenizer(context[:at], add_special_tokens=False)["input_ids"]) == question.labels["told_at"]
        depth = float(str(question.labels["depth"])[:-1]) / 100
        share = int(question.labels["told_at"]) / len(question.context)
        assert abs(share - depth) < 0.12, "a sentence or an entry, and what is written above the list"


@pytest.mark.parametrize("question", ["after", "before"])
@pytest.mark.parametrize("name", ALL)
def test_question_before_or_after_the_compression(name: str, question: str) -> None:
    """The same kind of text either way; ten candidates that begin differently, the true one first."""
    lm = sentences_lm()
    for made in asked(name, 6, tokens="400,900", question=question):
        whole = [*made.context, *made.after]
        rest = lm.tokenizer.decode([*made.after, made.candidates[0]])
        assert lm.tokenizer(text_of(tuple(whole)), add_special_tokens=False)["input_ids"] == whole
        marks = {
            "needle": "Question:",
            "keyvalue": "wanted key",
            "lines": "Tell me",
            "topics": "User: What is the first",
        }
        assert (marks[name] in text_of(made.after)) == (question == "after")
        assert (marks[name] in text_of(made.context)) == (question == "before")
        assert len(set(made.candidates)) == 10
        value = str(made.labels["value"])
        gap = " " if name in ("needle", "topics") else ""
        start = text_of(made.after).rstrip() + gap
        going_on = lm.tokenizer(start + value, add_special_tokens=False)["input_ids"]
        assert going_on[: len(made.after) + 1] == [*made.after, made.candidates[0]], rest
        assert len(going_on) - len(made.after) < made.write


def test_key_value_pairs_are_json_of_any_number() -> None:
    lm = sentences_lm()
    for keys, pattern in [("uuid", r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), ("hex", "[0-9a-f]{8}")]:
        task = generated_task("keyvalue", items="3,14", keys=keys)
        assert task.about() == {"items": "3,14", "question": "after", "keys": keys}
        for question, n in zip(task.questions(lm, 10, 0), [3, 14] * 5):  # type: ignore[attr-defined]
            text = text_of(question.context)
            pairs = json.loads(text[text.index("{") :])
            assert len(pairs) == n == question.labels["items"]
            assert all(re.fullmatch(pattern, word) for pair in pairs.items() for word in pair)
            place = list(pairs.values()).index(question.labels["value"])
            assert place == round(float(str(question.labels["depth"])[:-1]) / 100 * (n - 1))
            asked_for = text_of(question.after).split('"')[1]
            assert pairs[asked_for] == question.labels["value"]


def test_lines_have_names_of_their_own_also_where_words_run_out() -> None:
    from random import Random

    from kvatlas.quality.retrieval.names import names

    question = asked("lines", 1, tokens=3000)[0]
    found = re.findall(r"^line ([a-z]+-[a-z]+): REGISTER_CONTENT is <\d{5}>$", text_of(question.context), re.M)
    assert len(found) == len(set(found)) == question.labels["items"]
    many = names(9000, Random(0))
    assert len(set(many)) == 9000


def test_the_first_topic_of_several() -> None:
    lm = sentences_lm()
    themes = own("retention/fillers.json")["themes"]
    for question in asked("topics", 6, tokens="300,2600"):
        text = text_of(question.context)
        named = re.findall(r"I would like to discuss the topic of ([a-z]+)\.", text)
        assert named[0] == question.labels["value"] and len(set(named)) == len(named) == question.labels["items"]
        assert len(named) == (2 if len(question.context) < 999 else 5)
        assert set(named) <= set(themes)
        ten = [lm.tokenizer.decode([token]).strip() for token in question.candidates]
        assert all(any(topic.startswith(start) for start in ten) for topic in named), "the others are rivals"


def test_the_haystack_is_a_real_text() -> None:
    from kvatlas.workload.text import default_text

    manual = " ".join(default_text().text.split())
    for question in asked("needle", 5, tokens=500):
        straw = re.split(r" ?The secret code of the .*? is \d+\. ?", text_of(question.context).strip())
        assert all(piece[:80] in manual for piece in straw if piece)


@needs_data
def test_moby_dick_without_what_stands_around_it() -> None:
    task = generated_task("needle", text="moby-dick", data_dir=DATA, tokens=500)
    text = task._hay.text  # type: ignore[attr-defined]
    assert "whale" in text and "Gutenberg" not in text and "START OF" not in text
    assert task.about()["text"] == "moby-dick"
    assert len(task.questions(sentences_lm(), 2, 0)) == 2  # type: ignore[attr-defined]


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("The quick fox ran over the hill. " * 40)
    task = generated_task("needle", text=tmp_path / "own.txt", tokens=300)
    question = task.questions(sentences_lm(), 1, 0)[0]  # type: ignore[attr-defined]
    assert "quick fox" in text_of(question.context) and task.about()["text"] == "own.txt"
    with pytest.raises(UserError, match="no file"):
        generated_task("needle", text=tmp_path / "none.txt").about()
    with pytest.raises(UserError, match="say where it is"):
        asked("needle", 1, text="moby-dick")
    with pytest.raises(UserError, match="no file /nowhere/gutenberg"):
        asked("needle", 1, text="moby-dick", data_dir="/nowhere")


@pytest.mark.parametrize("name", ALL)
def test_judging(name: str) -> None:
    lm, task = sentences_lm(), generated_task(name, tokens=300)
    assert [(m.name, m.kind, m.higher_is_better) for m in task.metrics] == [
        ("retrieved", "right", True),
        ("rank", "value", False),
    ]
    question = task.questions(lm, 1, 0)[0]  # type: ignore[attr-defined]
    value = str(question.labels["value"])
    wrong = value[:-1] + ("x" if value[-1] != "x" else "y")
    for said, hit in [(f'{value}"\n', 1.0), (wrong, 0.0), (f"the {value}", 0.0)]:
        assert task.judge(lm, question, replied(lm, question, said))["retrieved"] == hit  # type: ignore[attr-defined]
    middle = replied(lm, question, "", (-3.0, *[-1.0] * 4, *[-9.0] * 5))
    assert task.judge(lm, question, middle) == {"retrieved": 0.0, "rank": 5.0}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ALL)
def test_run_under_strategies(name: str) -> None:
    found = generated_task(name, tokens="256").run(sentences_lm(), ["full", "streaming:0.2"], 6, 0, None)
    assert [len(one.samples) for one in found.values()] == [6, 6]
    assert all(set(s.metrics) == {"retrieved", "rank"} for one in found.values() for s in one.samples)


@pytest.mark.parametrize("name", ALL)
def test_what_cannot_be_made(name: str) -> None:
    with pytest.raises(UserError, match="the limit must be 1 sample or more, not 0"):
        asked(name, 0)
    with pytest.raises(UserError, match="the model has 8192 positions"):
        asked(name, 1, tokens=8190)
    with pytest.raises(UserError, match="unknown question 'befor'; did you mean 'before'"):
        generated_task(name, question="befor")
    with pytest.raises(UserError, match=f"the task {name} has no option 'format'"):
        generated_task(name, format="chat")
    lm = sentences_lm()
    with pytest.raises(UserError, match=f"{name} needs a tokenizer"):
        generated_task(name).questions(type(lm)(lm.model), 1, 0)  # type: ignore[attr-defined]


def test_an_item_that_does_not_fit() -> None:
    with pytest.raises(UserError, match="no room for two entries of keyvalue"):
        asked("keyvalue", 1, tokens=80, keys="uuid")
    with pytest.raises(UserError, match="items must be 2 or more"):
        generated_task("keyvalue", items=1)
    with pytest.raises(UserError, match="unknown keys 'uid'; did you mean 'uuid'"):
        generated_task("keyvalue", keys="uid")
