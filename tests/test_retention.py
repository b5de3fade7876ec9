"""Told facts: where they are told, what is asked when, how an answer is judged, and what `full` recalls."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sentences import replied, sentences_lm

from kvatlas.errors import UserError
from kvatlas.quality.generated import NAMES, generated_task, options_of
from kvatlas.quality.question import Question
from kvatlas.quality.retention.facts import all_values, kinds
from kvatlas.quality.retention.fillers import Fillers, own_turns, turns_of, words
from kvatlas.quality.retention.form import Plain, Turn
from kvatlas.workload.text import Text

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not (DATA / "mt_bench_101").is_dir(), reason="the benchmark data are not here")


def asked(limit: int = 20, seed: int = 0, chat: bool = False, **options: Any) -> list[Question]:
    task = generated_task("retention", **options)
    return task.questions(sentences_lm(chat=chat), limit, seed)  # type: ignore[attr-defined]


def text_of(tokens: tuple[int, ...], chat: bool = False) -> str:
    return sentences_lm(chat=chat).tokenizer.decode(tokens, skip_special_tokens=True)


def fact_of(question: Question) -> Any:
    """The one fact whose start of an answer is what is read last."""
    tail = text_of(question.context[-40:] + question.after)
    found = [fact for fact in kinds()[str(question.labels["kind"])] if tail.rstrip().endswith(prime(fact, question))]
    return max(found, key=lambda fact: len(fact.prime))


def prime(fact: Any, question: Question) -> str:
    """How the answer begins."""
    who = "I told you that" if question.labels["variant"] == "assistant" else "You told me that"
    return f"{who} {fact.prime[0].lower()}{fact.prime[1:]}"


def test_facts_of_ten_kinds_and_fillers_that_do_not_mention_them() -> None:
    assert len(kinds()) >= 10 and sum(map(len, kinds().values())) >= 60
    turns = own_turns()
    assert len(turns) >= 120 and len(set(turns)) == len(turns)
    told = words(*all_values())
    assert [turn for turn in turns if words(*turn) & told] == []
    for facts in kinds().values():
        assert len({fact.prime for fact in facts}) == len({fact.ask for fact in facts}) == len(facts)
        for fact in facts:
            assert fact.tell.count("{}") == 1 and not words(fact.reply, fact.ask, fact.prime) & told


def test_a_sample_depends_on_its_number_and_the_seed_alone() -> None:
    many = asked(20)
    assert asked(7) == many[:7]
    assert asked(20, seed=1) != many and {q.name for q in asked(20, seed=1)} == {q.name for q in many}
    assert len({q.name for q in many}) == 20


def test_spread_evenly_over_lengths_turns_depths_and_kinds() -> None:
    questions = asked(72, tokens="256,600,900", distance="1,3,9")
    near = [min((256, 600, 900), key=lambda n: abs(n - len(q.context))) for q in questions]
    cells = Counter(zip(near, (q.labels["turns"] for q in questions)))
    assert len(cells) == 9 and set(cells.values()) == {8}
    assert set(Counter(q.labels["kind"] for q in questions).values()) == {72 // len(kinds())}
    depths = Counter(q.labels["depth"] for q in questions if int(q.labels["context_tokens"]) > 500)
    assert set(depths) == {"0%", "20%", "40%"} and min(depths.values()) >= 14
    first = [(q.labels["kind"], fact_of(q).prime) for q in questions]
    assert len(set(first)) == len(first), "every fact comes once before one comes again"


@pytest.mark.parametrize(
    "fillers", ["own", pytest.param("mtbench101", marks=needs_data), pytest.param("sgd", marks=needs_data)]
)
def test_turns_and_tokens_are_what_was_asked_for(fillers: str) -> None:
    """Also one turn in 4,000 tokens and twelve in 300; and nothing but the fact mentions its value or its rivals."""
    data = None if fillers == "own" else str(DATA)
    questions = asked(12, tokens="300,1200,4000", distance="1,12", fillers=fillers, data_dir=data)
    for question, wanted in zip(questions, [300, 1200, 4000] * 4):
        total = len(question.context)
        assert wanted * 0.9 - 16 <= total <= wanted * 1.03 + 16 and total == question.labels["context_tokens"]
        at = int(question.labels["told_at"])
        before, rest = text_of(question.context[:at]), text_of(question.context[at:])
        fact, value = fact_of(question), str(question.labels["value"])
        told = f"User: {fact.tell.format(value)}\nAssistant: {fact.reply}\n"
        assert rest.startswith(told) and value not in before + rest[len(told) :]
        assert rest.count("\nUser: ") == question.labels["turns"]
        share = float(str(question.labels["depth"])[:-1]) / 100
        turns_before = max(1, round(int(question.labels["turns"]) * share / (1 - share))) if share else 0
        assert before.count("User: ") == turns_before
        assert question.labels["distance_tokens"] == total - at >= min(240, total - 1)
        assert abs(at / total - float(str(question.labels["depth"])[:-1]) / 100) < 0.03
        assert text_of(question.after).strip() == f"User: {fact.ask}\nAssistant: {prime(fact, question)}"
        assert question.labels["tokens"] == {300: "up to 1K", 1200: "1-2K", 4000: "2-4K"}[wanted]


def test_ten_candidates_begin_differently_and_the_value_is_the_first() -> None:
    lm = sentences_lm()
    for question in asked(24, tokens=300):
        assert len(set(question.candidates)) == 10
        fact, value = fact_of(question), question.labels["value"]
        tail = f"User: {fact.ask}\nAssistant: {prime(fact, question)} {value}"
        tokens = lm.tokenizer(tail, add_special_tokens=False)["input_ids"]
        read = len(question.after)
        assert tokens[: read + 1] == [*question.after, question.candidates[0]]
        assert read < len(tokens) <= read + question.write - 1


@pytest.mark.parametrize("turns", ["one-prefill", "live"])
@pytest.mark.parametrize("format", ["plain", "chat"])
@pytest.mark.parametrize("question", ["after", "before"])
@pytest.mark.parametrize("answer", ["primed", "free"])
def test_the_modes_hold_the_same_tokens_in_other_places(question: str, format: str, turns: str, answer: str) -> None:
    """One text: what differs is what is compressed, what is appended as a turn, and what is read after it."""
    chat = format == "chat"
    lm = sentences_lm(chat=chat)
    options = {"question": question, "format": format, "turns": turns, "answer": answer}
    for made in asked(4, chat=chat, tokens=600, distance=3, **options):
        parts = [made.context, *made.live, made.after]
        whole = [token for part in parts for token in part]
        text = lm.tokenizer.decode(whole)
        assert lm.tokenizer(text, add_special_tokens=False)["input_ids"] == whole
        asking = [fact.ask for fact in kinds()[str(made.labels["kind"])] if fact.ask in text]
        assert len(asking) == 1
        assert (asking[0] in text_of(made.after, chat)) == (question == "after")
        assert len(made.live) == (0 if turns == "one-prefill" else 3)
        if turns == "live":
            assert str(made.labels["value"]) in text_of(made.context, chat)
            assert all(text_of(turn, chat).startswith("[user]\n" if chat else "User: ") for turn in made.live)
        assert bool(made.candidates) == (answer == "primed")
        opening = "[assistant]\n" if chat else "Assistant:"
        assert text.rstrip(" ").endswith(opening) == (answer == "free")


def test_two_facts_of_different_kinds_are_told_in_one_turn_and_one_is_asked_for() -> None:
    firsts = set()
    for question in asked(12, tokens=400, variant="two"):
        text, fact = text_of(question.context), fact_of(question)
        told = text_of(question.context[int(question.labels["told_at"]) :]).split("\n")[0].removeprefix("User: ")
        mine = fact.tell.format(question.labels["value"])
        beside = told.replace(mine, "").strip()
        facts = [one for kind in kinds() if kind != fact.kind for one in kinds()[kind]]
        assert mine in told and any(
            re.fullmatch(re.escape(one.tell).replace(r"\{\}", r"(\w+)"), beside) for one in facts
        )
        assert text.count(beside) == 1
        firsts.add(told.startswith(mine))
    assert firsts == {True, False}


def test_of_an_updated_fact_the_later_value_counts() -> None:
    lm, task = sentences_lm(), generated_task("retention", variant="updated", tokens=900)
    assert [metric.name for metric in task.metrics] == ["recalled", "rank", "stale"]
    assert [metric.higher_is_better for metric in task.metrics] == [True, False, False]
    for question in task.questions(lm, 9, 0):  # type: ignore[attr-defined]
        text, fact = text_of(question.context), fact_of(question)
        old, new = (fact.tell.format(question.labels[which]) for which in ("old", "value"))
        assert text.startswith(f"User: {old}\n") and text.count(old) == text.count(new) == 1
        assert text.index(new) > text.index(old)
        head = len(lm.tokenizer(text[: text.index("User: What I told you has changed.")])["input_ids"])
        assert head == question.labels["told_at"]
        judged = [task.judge(lm, question, replied(lm, question, f" {question.labels[k]}.")) for k in ("value", "old")]  # type: ignore[attr-defined]
        assert [(j["recalled"], j["stale"]) for j in judged] == [(1.0, 0.0), (0.0, 1.0)]


def test_what_only_the_assistant_said() -> None:
    for question in asked(6, tokens=400, variant="assistant"):
        text, value = text_of(question.context), str(question.labels["value"])
        lines = [line for line in text.split("\n") if value in words_of(line)]
        assert lines == [f"Assistant: {fact_of(question).prime} {value}."]


def words_of(line: str) -> list[str]:
    return re.findall(r"\w+", line)


def test_no_filler_and_no_passage_with_a_forbidden_word() -> None:
    tokenizer = sentences_lm().tokenizer
    turns = [Turn("My cat is black.", "I see."), Turn("Is it late?", "Black as night."), Turn("Fine.", "Good.")]
    text = Text("Nothing is Black here at all.\n\nThe sea was calm, and the wind came from the north.", "a text")
    fillers = Fillers(tokenizer, Plain(), turns, text)
    for i in range(20):
        made = fillers.fill(1, 60, Random(i), words("black"))
        assert "calm" in made[0].said and not words(*made[0]) & {"black"}
        assert 50 <= fillers.tokens(*made) <= 60


def test_all_variants_in_turn() -> None:
    questions = asked(8, tokens=400, variant="all")
    assert [q.labels["variant"] for q in questions] == ["one", "two", "updated", "assistant"] * 2


def test_judging() -> None:
    lm, primed, free = (
        sentences_lm(),
        generated_task("retention", tokens=300),
        generated_task("retention", tokens=300, answer="free"),
    )
    question = primed.questions(lm, 1, 0)[0]  # type: ignore[attr-defined]
    value = str(question.labels["value"])
    for said, hit, holds in [
        (f" {value}.\nUser:", 1.0, 1.0),
        (f" {value.upper()}", 1.0, 1.0),
        (f" not {value}.", 0.0, 1.0),
        (f" {value}s", 0.0, 0.0),
        ("", 0.0, 0.0),
    ]:
        assert primed.judge(lm, question, replied(lm, question, said))["recalled"] == hit  # type: ignore[attr-defined]
        assert free.judge(lm, question, replied(lm, question, said)) == {"recalled": holds}  # type: ignore[attr-defined]
    for scores, rank in [
        ((0.0, *[-1.0] * 9), 1.0),
        ((-2.0, *[-1.0] * 3, *[-3.0] * 6), 4.0),
        ((-2.0, *[-1.0] * 9), 10.0),
        ((-1.0, -1.0, *[-2.0] * 8), 2.0),
        ((float("nan"), *[-1.0] * 9), 10.0),
    ]:
        assert primed.judge(lm, question, replied(lm, question, "x", scores))["rank"] == rank  # type: ignore[attr-defined]


def test_run_under_strategies() -> None:
    """The whole way on a model that knows nothing: pairs by name, and a rank that is spread over the ten."""
    task = generated_task("retention", tokens="256", distance=2)
    found = task.run(sentences_lm(), ["full", "streaming:0.2"], 24, 0, None)
    full, less = found["full"].samples, found["streaming:0.2"].samples
    assert [s.name for s in full] == [s.name for s in less] and len(full) == 24
    assert sum(s.metrics["recalled"] for s in full) <= 4
    assert 2 < sum(s.metrics["rank"] for s in full) / 24 < 9
    assert all(f.kept < 0.4 for f in found["streaming:0.2"].footprints)
    json.dumps(task.about())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "chats"}, "unknown format 'chats'; did you mean 'chat'?"),
        ({"variant": "updates"}, "unknown variant 'updates'; did you mean 'updated'?"),
        ({"fillers": "mtbench"}, "unknown fillers 'mtbench'; did you mean 'mtbench101'?"),
        ({"question": "during"}, "unknown question 'during'"),
        ({"turns": "alive"}, "unknown turns 'alive'; did you mean 'live'?"),
        ({"answer": "3"}, "unknown answer '3'"),
        ({"tokens": "many"}, "tokens must be a number"),
        ({"tokens": "4000-256"}, "tokens must be a number"),
        ({"tokens": "10"}, "tokens must be 64 or more, not 10"),
        ({"distance": "0-3"}, "distance must be 1 or more, not 0"),
        ({"depth": 1}, "the task retention has no option 'depth'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        generated_task("retention", **options)


@pytest.mark.parametrize(
    ("options", "limit", "message"),
    [
        ({}, 0, "the limit must be 1 sample or more, not 0"),
        ({"tokens": 64, "variant": "updated", "question": "before"}, 12, "which a context of 64 has no room for"),
        ({"tokens": 100, "distance": 12}, 12, "12 turns do not fit into"),
        ({"tokens": 9000}, 1, "the model has 8192 positions"),
        ({"format": "chat"}, 1, "this tokenizer has none; use format=plain"),
        ({"fillers": "sgd"}, 1, "say where it is"),
        ({"fillers": "sgd", "data_dir": "/nowhere"}, 1, "no file /nowhere/sgd_dialogues"),
    ],
)
def test_what_cannot_be_made(options: dict[str, Any], limit: int, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as error:
        asked(limit, **options)
    assert "\n" not in str(error.value)


def test_no_tokenizer_and_a_tokenizer_that_tells_no_ten_apart() -> None:
    lm = sentences_lm()
    with pytest.raises(UserError, match="needs a tokenizer"):
        generated_task("retention").questions(type(lm)(lm.model), 1, 0)  # type: ignore[attr-defined]
    from kvatlas.quality.primed import ten_apart

    with pytest.raises(UserError, match="tells only 2 of the values of 'pet' apart"):
        ten_apart(lm.tokenizer, "It is", ["Rex", "Rexx", "Bello"] * 9, "pet")


def test_every_kind_gives_ten_even_where_each_byte_is_a_token() -> None:
    lm = sentences_lm(words=False)
    questions = generated_task("retention", tokens="1500").questions(lm, len(kinds()), 0)  # type: ignore[attr-defined]
    assert {len(set(q.candidates)) for q in questions} == {10}


def test_data_that_are_not_as_they_should_be(tmp_path: Path) -> None:
    (tmp_path / "mt_bench_101").mkdir()
    file = tmp_path / "mt_bench_101" / "mtbench101.jsonl"
    file.write_text('{"history": [{"user": "a", "bot": "b"}]}\n{"history": [{"user": "a"}]}\n')
    with pytest.raises(UserError, match=r"mtbench101.jsonl, line 2: a record with 'history'"):
        turns_of("mtbench101", tmp_path)
    (tmp_path / "sgd_dialogues").mkdir()
    (tmp_path / "sgd_dialogues" / "test_dialogues_011.json").write_text("[{}]")
    with pytest.raises(UserError, match="dialogues with 'turns'"):
        turns_of("sgd", tmp_path)


def test_the_registry() -> None:
    assert NAMES == ("retention", "needle", "keyvalue", "lines", "topics")
    assert "variant" in options_of("retention") and "variant" not in options_of("lines")
    with pytest.raises(UserError, match="unknown task 'needles'; did you mean 'needle'"):
        generated_task("needles")
    about = generated_task("retention", variant=None).about()
    assert about["variant"] == "one" and about == generated_task("retention").about()
    for name in ("tokens", "distance", "question", "turns", "format", "answer", "variant"):
        other = {
            "tokens": 512,
            "distance": 3,
            "question": "before",
            "turns": "live",
            "format": "chat",
            "answer": "free",
            "variant": "two",
        }
        assert generated_task("retention", **{name: other[name]}).about() != about
    assert all(dataclasses.is_dataclass(generated_task(name)) for name in NAMES)


@pytest.mark.real
def test_full_recalls_short_conversations_on_the_default_model() -> None:
    import kvatlas

    lm = kvatlas.load("smollm2", dtype="float32")
    task = generated_task("retention", tokens="256", distance="1-4")
    found = task.run(lm, ["full", "random:0.05"], 20, 0, None)
    recalled = {spec: sum(s.metrics["recalled"] for s in one.samples) for spec, one in found.items()}
    assert recalled["full"] >= 16 and recalled["random:0.05"] <= 6
