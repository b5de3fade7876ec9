"""Questions to compressed caches: what is scored is transformers' own under `full`, else one-by-one decode's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from specs import lm_of, prompts

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.quality import asking, asking_batches
from kvatlas.quality.asking import ask
from kvatlas.quality.question import Choice, Question, Reply
from kvatlas.quality.replies import Replies
from kvatlas.strategy.spec import parse

LOSSY = ("h2o:0.3", "streaming:0.3", "random:0.2", "snapkv:0.3", "quest:0.3,page=4", "infinigen:0.3", "int8")


def tokens(n: int, seed: int) -> tuple[int, ...]:
    return tuple(prompts(n, seed=seed)[0])


def questions(live: bool = False) -> list[Question]:
    """Ragged contexts, choices of different lengths (one token too), given tokens, candidates, and greedy answers."""
    found = []
    for i, n in enumerate((40, 37, 23, 60, 18, 2)):
        choices = tuple(Choice(tokens(m, 20 + i), given) for m, given in ((1, 0), (4, 0), (7, 2), (2, 1)))
        found.append(
            Question(
                f"q{i}",
                tokens(n, i),
                live=(tokens(6, 40 + i), tokens(1 + i % 3, 50 + i)) if live else (),
                after=tokens(3, 30 + i)[: 1 if i == 4 else 3],
                choices=choices[: 1 + i % 4],
                candidates=(3, 5, 9) if i % 2 else (),
                write=(0, 1, 6)[i % 3],
            )
        )
    return found


def in_order(q: Question) -> list[int]:
    return [*q.context, *(t for turn in q.live for t in turn), *q.after]


def close(reply: Reply, choices: Sequence[tuple[float, bool]], candidates: Sequence[float], tol: float = 1e-4) -> None:
    assert reply.choices == pytest.approx([value for value, _ in choices], abs=tol)
    assert list(reply.greedy) == [greedy for _, greedy in choices]
    assert reply.candidates == pytest.approx(candidates, abs=tol)


@torch.no_grad()
def plain(lm: LM, q: Question) -> tuple[list[tuple[float, bool]], list[float], list[int]]:
    """A question by transformers' own forward of each whole text, which no cache of ours has a part in."""
    before = in_order(q)
    scored = []
    for choice in q.choices:
        logits = lm.model(torch.tensor([before + list(choice.tokens)])).logits[0].log_softmax(-1)
        own = logits[len(before) - 1 : -1]
        wanted = range(choice.unscored, len(choice.tokens))
        scored.append((
            sum(float(own[j, choice.tokens[j]]) for j in wanted),
            all(int(own[j].argmax()) == choice.tokens[j] for j in wanted),
        ))  # fmt: skip
    last = lm.model(torch.tensor([before])).logits[0, -1].log_softmax(-1)
    written: list[int] = []
    for _ in range(q.write):
        written.append(int(lm.model(torch.tensor([before + written])).logits[0, -1].argmax()))
    return scored, [float(last[t]) for t in q.candidates], written


@torch.no_grad()
def slow(lm: LM, q: Question, spec: str) -> tuple[list[tuple[float, bool]], list[float], list[int]]:
    """A question under a strategy, alone: a cache of its own for every choice, and no rows ever selected."""

    def begin() -> tuple[object, torch.Tensor]:
        cache = lm.new_cache(spec)
        lm.prefill(cache, [q.context if q.live else q.context[:-1]], reserve=40)
        for number, turn in enumerate(q.live):
            run = turn if number + 1 < len(q.live) else turn[:-1]
            if run:
                lm.extend(cache, 0, run)
        for token in ((q.live or (q.context,))[-1][-1], *q.after):
            logits = lm.step(cache, torch.tensor([token]))
        return cache, logits[0].log_softmax(-1)

    scored = []
    for choice in q.choices:
        cache, now = begin()
        total, greedy = 0.0, True
        for j, token in enumerate(choice.tokens):
            if j >= choice.unscored:
                total, greedy = total + float(now[token]), greedy and int(now.argmax()) == token
            now = lm.step(cache, torch.tensor([token]))[0].log_softmax(-1)  # type: ignore[arg-type]
        scored.append((total, greedy))
    cache, now = begin()
    candidates, written = [float(now[t]) for t in q.candidates], []
    for _ in range(q.write):
        written.append(int(now.argmax()))
        now = lm.step(cache, torch.tensor([written[-1]]))[0].log_softmax(-1)  # type: ignore[arg-type]
    return scored, candidates, written


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss", "opt"])
@pytest.mark.parametrize("live", [False, True])
def test_full_is_transformers_own(arch: str, live: bool) -> None:
    lm, asked = lm_of(arch), questions(live)
    for q, reply in zip(asked, ask(lm, ["full"], asked)["full"]):
        choices, candidates, written = plain(lm, q)
        close(reply, choices, candidates)
        assert list(reply.written) == written


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("live", [False, True])
def test_a_strategy_is_what_it_is_alone_and_one_by_one(spec: str, live: bool) -> None:
    lm, asked = lm_of("llama"), questions(live)
    full = ask(lm, ["full"], asked)["full"]
    differs = 0
    for q, reply, whole in zip(asked, ask(lm, [spec], asked)[spec], full):
        choices, candidates, written = slow(lm, q, spec)
        close(reply, choices, candidates)
        assert list(reply.written) == written
        differs += reply.choices != pytest.approx(whole.choices, abs=1e-3)
    assert differs or spec == "int8", "a strategy that loses nothing here would show nothing"


def test_greedy_choices_are_seen_as_such() -> None:
    lm, q = lm_of("llama"), questions()[0]
    written = ask(lm, ["full"], [replace(q, write=5)])["full"][0].written
    wrong = (*written[:4], (written[4] + 1) % 256)
    asked = replace(q, choices=(Choice(written), Choice(wrong), Choice((7, *written[1:]), 1), Choice(written[:1])))
    assert ask(lm, ["full"], [asked])["full"][0].greedy == (True, False, False, True)


def test_specs_together_are_specs_alone_to_the_bit() -> None:
    lm, asked = lm_of("llama"), questions()
    specs = ["h2o:0.3", "full", "random:0.2", "quest:0.3,page=4", "h2o:0.5", "infinigen:0.3", "streaming:0.3", "paged"]
    together = ask(lm, specs, asked)
    assert list(together) == specs
    assert ask(lm, specs, asked) == together
    assert ask(lm, specs[::-1], asked) == together
    for spec in specs:
        assert ask(lm, [spec], asked)[spec] == together[spec], spec


def test_finished_batches_are_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked before a kill is read; the rest gives what an undisturbed run gives, to the last digit."""
    lm, asked, specs = lm_of("llama"), questions(), ["full", "h2o:0.3", "quest:0.3,page=4"]
    want, own, seen = ask(lm, specs, asked), asking._ask, []

    def stops(lm: LM, left: list[str], batch: list[Question], *rest: Any) -> Any:
        for spec, replies in own(lm, left, batch, *rest):
            if len(seen) == 4:
                raise KeyboardInterrupt
            seen.append((spec, batch))
            yield spec, replies

    kept = Replies(tmp_path / "partial" / "task", ["weights"])
    monkeypatch.setattr(asking, "_ask", stops)
    with pytest.raises(KeyboardInterrupt):
        ask(lm, specs, asked, kept=kept)
    assert len(list(kept.folder.iterdir())) == 4
    monkeypatch.setattr(asking, "_ask", own)
    calls = spy(monkeypatch)
    assert ask(lm, specs, asked, kept=kept) == want
    batches = len(asking_batches.batches(lm, asked))
    assert sum(map(len, calls)) == len(specs) * batches - 4 > 0
    calls.clear()
    assert ask(lm, specs, asked, kept=kept) == want and not calls
    assert ask(lm, ["full"], asked, kept=Replies(kept.folder, ["others"])) == {"full": want["full"]} and calls
    calls.clear()
    next(kept.folder.iterdir()).write_text("[{")
    assert ask(lm, specs, asked, kept=kept) == want and (len(calls) == 1 or calls == [])
    kept.clear()
    assert not (tmp_path / "partial").exists()


def spy(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Which strategies each batch is asked under."""
    calls: list[list[str]] = []
    own = asking._ask

    def asked(lm: LM, left: list[str], *rest: Any) -> Any:
        calls.append(left)
        return own(lm, left, *rest)

    monkeypatch.setattr(asking, "_ask", asked)
    return calls


def test_the_reference_leads_every_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    own = asking.compressed

    def spied(model: LM, specs: list[str], *rest: Any) -> Any:
        seen.append(specs)
        return own(model, specs, *rest)

    monkeypatch.setattr(asking, "compressed", spied)
    for specs in (["h2o:0.3"], ["h2o:0.3", "full"], ["full"]):
        assert list(ask(lm_of("llama"), specs, questions()[:1])) == specs
    assert seen == [["full", "h2o:0.3"], ["full", "h2o:0.3"], ["full"]]


@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "quest:0.3,page=4"])
def test_what_is_written_begins_when_its_question_was_read(spec: str) -> None:
    """Questions of different lengths share a batch, and each gets what it gets alone; no row is moved too early."""
    lm = lm_of("llama")
    asked = [
        Question(
            f"q{i}", tokens(40 + i, i), after=tokens(n, 9 + i), candidates=(1, 5, 9), write=w, choices=(Choice((i,)),)
        )
        for i, (n, w) in enumerate([(0, 3), (5, 1), (2, 6), (7, 2), (1, 0), (3, 9)])
    ]
    assert len(asking_batches.batches(lm, asked)) == 1
    together = ask(lm, [spec], asked)[spec]
    for question, reply in zip(asked, together):
        [alone] = ask(lm, [spec], [question])[spec]
        assert reply.written == alone.written and len(reply.written) <= question.write
        assert reply.candidates == pytest.approx(alone.candidates, abs=1e-4)
        assert reply.choices == pytest.approx(alone.choices, abs=1e-4)


def test_little_memory_makes_small_batches_and_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, asked = lm_of("llama"), questions()
    many = ask(lm, ["h2o:0.3"], asked)["h2o:0.3"]
    assert max(map(len, asking_batches.batches(lm, asked))) > 1
    monkeypatch.setattr(asking_batches, "FORKED_BYTES", 100 * asking_batches.token_bytes(lm))
    monkeypatch.setattr(asking, "rows_forked", lambda lm, batch: 2)
    assert len(asking_batches.batches(lm, asked)) > 3
    for few, one in zip(ask(lm, ["h2o:0.3"], asked)["h2o:0.3"], many):
        close(few, list(zip(one.choices, one.greedy)), one.candidates, 1e-5)
        assert few.written == one.written


def test_a_batch_is_fed_alike_and_never_passes_the_positions() -> None:
    lm = lm_of("llama")
    limit = lm.facts.max_positions or 0
    near = Question("near", tokens(limit - 3, 0), choices=(Choice((1, 2)),))
    far = Question("far", tokens(limit - 60, 0), choices=(Choice(tokens(50, 1)),))
    asked = [*questions(), *questions(live=True), near, far]
    found = asking_batches.batches(lm, asked)
    assert sorted(i for batch in found for i in batch) == list(range(len(asked)))
    for batch in found:
        own = [asked[i] for i in batch]
        forked = any(len(choice.tokens) > 1 for q in own for choice in q.choices)
        assert len({(len(q.after) if forked else 0, bool(q.live)) for q in own}) == 1
        assert max(q.tokens for q in own) + max(map(asking_batches.longest, own)) <= limit


def test_steps_are_shared_and_short_answers_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, rows = lm_of("llama"), []
    step = lm.step
    monkeypatch.setattr(lm, "step", lambda cache, ids: rows.append(len(ids)) or step(cache, ids))
    asked = [Question(str(i), tokens(20 + i, i), choices=(Choice((3,)), Choice((4,)))) for i in range(5)]
    ask(lm, ["full"], asked)
    assert rows == [5]
    rows.clear()
    ask(lm, ["full"], [replace(q, choices=(Choice((3, 5, 6)), Choice((4, 8)))) for q in asked])
    assert rows == [5, 10, 5]


def test_rows_that_are_over_are_dropped_where_that_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, rows = lm_of("llama"), []
    step = lm.step
    monkeypatch.setattr(lm, "step", lambda cache, ids: rows.append(len(ids)) or step(cache, ids))
    choices = tuple(Choice(tokens(n, 5)) for n in (2, 3, 3, 6))
    asked = [Question(str(i), tokens(30, i), choices=choices) for i in range(2)]
    for spec, seen in (("h2o:0.3", [2, 8, 8, 2, 2, 2]), ("h2o:0.5+quest:0.5,page=4", [2, 8, 8, 8, 8, 8])):
        rows.clear()
        found = ask(lm, [spec], asked)[spec]
        assert rows == seen
        for q, reply in zip(asked, found):
            for number, choice in enumerate(choices):
                alone = ask(lm, [spec], [replace(q, choices=(choice, Choice((1, 2))))])[spec][0]
                assert reply.choices[number] == pytest.approx(alone.choices[0], abs=1e-4)


def test_what_is_written_ends_at_a_stop_token_or_where_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, q = lm_of("llama"), replace(questions()[0], choices=(Choice(tokens(9, 1)),), write=8)
    whole = ask(lm, ["full"], [q])["full"][0]
    assert len(whole.written) == 8
    assert ask(lm, ["full"], [q], ended=lambda ids: len(ids) == 3)["full"][0].written == whole.written[:3]
    end = next(token for token in whole.written if token != whole.written[0])
    monkeypatch.setattr(lm, "stop_ids", lambda: [end])
    stopped = ask(lm, ["full"], [q])["full"][0]
    assert stopped.written == whole.written[: whole.written.index(end)]
    assert stopped.choices == whole.choices


def test_the_footprint_is_of_one_sequence_before_the_choices() -> None:
    lm = lm_of("llama")
    token = asking_batches.token_bytes(lm)
    asked = [Question(str(i), tokens(40, i), choices=tuple(Choice(tokens(5, c)) for c in range(4))) for i in range(3)]
    found = ask(lm, ["full", "h2o:0.5", "host"], asked)
    full, h2o, host = (found[spec][0].footprint for spec in found)
    assert (full.kept, full.read, full.read_bytes) == (1.0, 1.0, 40 * token)
    assert 40 * token <= full.device_bytes <= 50 * token
    assert 0.4 <= h2o.kept <= 0.55 and h2o.device_bytes < 0.7 * full.device_bytes
    assert host.device_bytes < 0.5 * host.total_bytes
    assert len({reply.footprint for reply in found["full"]}) == 1


def test_progress_reaches_the_end_and_never_goes_back() -> None:
    told: list[float] = []
    ask(lm_of("llama"), ["full", "h2o:0.3"], questions(), lambda what, share: told.append(share))
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)


def test_nothing_asked_gives_nothing() -> None:
    assert ask(lm_of("llama"), ["full"], []) == {"full": []}
    assert ask(lm_of("llama"), [], questions()) == {}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"context": (5,)}, "'q0': a context needs 2 tokens or more"),
        ({"live": ((3, 4), ())}, "'q0': a live turn needs 1 token"),
        ({"choices": (Choice((3, 4), 2),)}, "'q0': a choice needs 1 scored token"),
        ({"write": 600}, "'q0': 43 prompt .* the model has 512 positions"),
        ({"context": tokens(510, 1)}, "'q0': .* 512 positions"),
    ],
)
def test_bad_questions_say_which_one_and_why(bad: dict[str, object], says: str) -> None:
    asked = [replace(questions()[0], **bad), questions()[1]]  # type: ignore[arg-type]
    with pytest.raises(UserError, match=says):
        ask(lm_of("llama"), ["full"], asked)


def test_an_unknown_strategy_is_said_before_anything_runs() -> None:
    with pytest.raises(UserError, match="h2o"):
        ask(lm_of("llama"), ["full", "h20:0.3"], questions())
    assert parse("full").lossless()
