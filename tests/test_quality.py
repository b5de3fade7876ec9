"""What is lost: fidelity on text and recall of told facts."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specs import lm_of, prompts
from tiny import tiny_model

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.quality import reading
from kvatlas.quality import recall as recall_module
from kvatlas.quality.fidelity import Fidelity, divergence, fidelity
from kvatlas.quality.reading import Fractions
from kvatlas.quality.recall import answers, conversations, is_hit, material, recall
from kvatlas.quality.run import measure_quality
from kvatlas.workload.text import Prompt, Text

LOSSLESS = ("paged", "h2o:1.0", "oracle:1.0", "infinigen:1.0,alpha=inf")
LOSSY = ("streaming:0.3", "h2o:0.3", "infinigen:0.3", "oracle:0.1", "random:0.3", "full:prefill=chunked-isolated:16")


class Letters:
    """A tokenizer for tiny models: one token a byte."""

    bos_token_id = eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("latin-1")


def talker() -> LM:
    """A tiny model with a tokenizer and room for conversations."""
    return LM(tiny_model("llama", max_position_embeddings=4096), Letters())


def windows(*contexts: int, continuation: int = 6) -> list[Prompt]:
    return [Prompt(tuple(ids[:-continuation]), tuple(ids[-continuation:]), 0)
            for ids in prompts(*(n + continuation for n in contexts))]  # fmt: skip


# --------------------------------------------------------------------- fidelity


def test_lossless_strategies_lose_nothing_and_lossy_ones_do() -> None:
    found = fidelity(lm_of("llama"), [*LOSSLESS, *LOSSY], windows(60, 41))
    assert list(found) == [*LOSSLESS, *LOSSY]
    for spec, one in found.items():
        assert len(one.kl) == len(one.top1) == len(one.nll) == 12
        if spec in LOSSLESS:
            assert max(one.kl) < 1e-6 and all(one.top1), spec
        else:
            assert one.divergence().value > 1e-3, spec


def test_full_is_the_reference_asked_for_or_not() -> None:
    lm, texts = lm_of("llama"), windows(50)
    found = fidelity(lm, ["h2o:0.3", "full", "h2o:0.3"], texts)
    assert list(found) == ["h2o:0.3", "full"]
    assert found["full"].kl == [0.0] * 6 and all(found["full"].top1)
    assert fidelity(lm, ["h2o:0.3"], texts)["h2o:0.3"].kl == found["h2o:0.3"].kl
    assert found["full"].fractions.kept == found["full"].fractions.read == [1.0, 1.0]
    assert max(found["h2o:0.3"].fractions.kept) <= 0.3


def test_perplexity_is_that_of_the_models_own_forward() -> None:
    lm, texts = lm_of("llama"), windows(50, 33)
    want = []
    for window in texts:
        ids = torch.tensor([[*window.ids, *window.continuation]])
        logits = lm.model(ids, use_cache=False).logits.double().log_softmax(-1)
        n = len(window.ids)
        want += [-float(logits[0, n - 1 + i, token]) for i, token in enumerate(window.continuation)]
    got = fidelity(lm, ["full"], texts)["full"]
    assert sorted(got.nll) == pytest.approx(sorted(want), abs=1e-4)
    figure = got.perplexity()
    assert figure.value == pytest.approx(math.exp(sum(want) / len(want)), rel=1e-4)
    assert figure.n == 12 and figure.low < figure.value < figure.high and figure.interval == "95% interval"


def test_more_windows_than_fit_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, texts = lm_of("llama"), windows(40, 30, 50)
    together = fidelity(lm, ["h2o:0.3"], texts)["h2o:0.3"]
    monkeypatch.setattr(reading, "CACHE_BYTES", 1)
    assert reading.rows_at_once(lm, 2, 50) == 1
    apart = fidelity(lm, ["h2o:0.3"], texts)["h2o:0.3"]
    assert sorted(apart.kl) == pytest.approx(sorted(together.kl), abs=1e-5)


def test_divergence_is_the_definition() -> None:
    p, q = (
        torch.randn(3, 7, dtype=torch.float64).log_softmax(-1),
        torch.randn(3, 7, dtype=torch.float64).log_softmax(-1),
    )
    torch.testing.assert_close(
        divergence(p, q), torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    )
    never = torch.tensor([[0.0, float("-inf")]], dtype=torch.float64)
    assert divergence(never, never).item() == 0.0
    half = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    assert divergence(never, half).item() == pytest.approx(math.log(2))
    assert divergence(half, never).item() == float("inf")


def test_a_broken_strategy_does_not_look_perfect() -> None:
    one = Fidelity()
    one.add(torch.zeros(1, 4, dtype=torch.float64).log_softmax(-1), torch.full((1, 4), float("nan")), torch.tensor([1]))
    assert math.isnan(one.kl[0])


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([], "at least one window"),
        ([Prompt((1,), (2,), 0)], "2 tokens or more"),
        ([Prompt((1, 2), (2,), 0), Prompt((1, 2), (2, 3), 0)], "same length"),
        ([Prompt((1, 2), (), 0)], "same length"),
        ([Prompt((1,) * 510, (2,) * 9, 0)], "positions"),
    ],
)
def test_windows_that_do_not_fit(texts: list[Prompt], says: str) -> None:
    with pytest.raises(UserError, match=says):
        fidelity(lm_of("llama"), ["full"], texts)


# --------------------------------------------------------------------- recall


@pytest.mark.parametrize(
    ("said", "value", "hit"),
    [
        (" Biscuit.\nUser", "Biscuit", True),
        (' "biscuit" and', "Biscuit", True),
        (" Biscuits", "Biscuit", False),
        (" a Biscuit", "Biscuit", False),
        (" 4172", "417", False),
        (" New York, of", "New York", True),
        (" New", "New York", False),
        ("", "Biscuit", False),
    ],
)
def test_what_counts_as_recalled(said: str, value: str, hit: bool) -> None:
    assert is_hit(said, value) == hit


def test_the_same_seed_gives_the_same_conversations() -> None:
    first = conversations(Letters(), 24, 600, seed=3)
    assert first == conversations(Letters(), 24, 600, seed=3)
    assert first != conversations(Letters(), 24, 600, seed=4)
    assert len({(talk.asked, talk.value) for talk in first}) == 24, "no fact twice"


def test_conversations_tell_the_fact_once_and_early_and_ask_at_the_end() -> None:
    for talk in conversations(Letters(), 24, 600, seed=1):
        text = bytes(talk.ids).decode()
        before, question = text[: -talk.question], text[-talk.question :]
        assert before.endswith("\n") and question.startswith(f"User: {talk.asked}\nAssistant: ")
        assert 600 <= len(before) < 900
        assert len(re.findall(rf"\b{talk.value}\b", text, re.IGNORECASE)) == 1
        assert text.index(talk.value) < 120


def test_the_other_turns_say_nothing_of_the_facts() -> None:
    words = {word for turn in material()["turns"] for word in re.findall(r"\w+", " ".join(turn).casefold())}
    facts = material()["facts"]
    assert not {value.casefold() for fact in facts for value in fact["values"]} & words
    assert all(len(fact["values"]) == len(set(fact["values"])) >= 2 and fact["tell"].count("{}") == 1 for fact in facts)
    assert len(facts) * 2 >= 24, "24 conversations need no value twice"


def test_recall_reads_what_generate_would_say() -> None:
    """Rows of different lengths, none of them padded: each says what transformers says to it alone."""
    lm = talker()
    found = recall(lm, ["full", "h2o:0.3", "paged"], n=5, tokens=150, seed=2)
    talks = conversations(lm.tokenizer, 5, 150, seed=2)
    assert len({talk.question for talk in talks}) > 1
    for talk, answer in zip(talks, found["full"].answers):
        ids = torch.tensor([talk.ids])
        out = lm.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(answer.said), do_sample=False
        )
        assert lm.decode(out[0, len(talk.ids) :].tolist()) == answer.said
        assert (answer.asked, answer.told) == (talk.asked, talk.value)
    assert [a.said for a in found["paged"].answers] == [a.said for a in found["full"].answers]
    assert [a.said for a in found["h2o:0.3"].answers] != [a.said for a in found["full"].answers]
    assert max(found["h2o:0.3"].fractions.kept) <= 0.3 < found["full"].fractions.kept[0]


def test_recall_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = talker()
    together = recall(lm, ["h2o:0.3"], n=4, tokens=150)["h2o:0.3"].answers
    fed: list[int] = []
    whole = recall_module.compressed

    def noting(lm: LM, specs: Any, contexts: list[list[int]], reserve: int) -> Any:
        fed.append(len(contexts))
        return whole(lm, specs, contexts, reserve)

    monkeypatch.setattr(recall_module, "compressed", noting)
    monkeypatch.setattr(reading, "CACHE_BYTES", 1)
    apart = recall(lm, ["h2o:0.3"], n=4, tokens=150)["h2o:0.3"].answers
    assert fed == [1, 1, 1, 1]
    assert apart == together


class Remembers:
    """A model and a cache in one: once the question is through, each row says what it was told to say."""

    def __init__(self, *lines: str, stop: int = 0) -> None:
        self.lines, self.stop, self.fed = [line.encode() for line in lines], stop, 0

    def step(self, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        self.fed += 1
        at = max(0, self.fed - 4)  # the question has 4 tokens
        logits = torch.zeros(len(self.lines), 256)
        for row, line in enumerate(self.lines):
            logits[row, line[at] if at < len(line) else self.stop] = 1.0
        return logits

    def realised(self) -> Any:
        return SimpleNamespace(kept=0.5, read=0.25)

    def stop_ids(self) -> list[int]:
        return [self.stop]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def test_answers_begin_after_the_question_and_end_at_a_stop_token() -> None:
    fake, fractions = Remembers(" Zeus", " Rocket!"), Fractions()
    said = answers(fake, fake, torch.zeros(2, 4, dtype=torch.int64), 8, fractions)  # type: ignore[arg-type]
    assert said == [" Zeus", " Rocket!"]
    assert [is_hit(s, "Zeus") for s in said] == [True, False]
    assert fractions.kept == [0.5] and fractions.read == [0.25]


def test_recall_needs_a_tokenizer_and_room() -> None:
    with pytest.raises(UserError, match="tokenizer"):
        recall(lm_of("llama"), ["full"])
    with pytest.raises(UserError, match="positions"):
        recall(LM(tiny_model("llama"), Letters()), ["full"], n=1, tokens=600)
    with pytest.raises(UserError, match="1 or more"):
        conversations(Letters(), 0)


# --------------------------------------------------------------------- the record's part


def test_quality_says_all_that_a_record_wants() -> None:
    lm, text, told = talker(), Text("The quick brown fox jumps over the lazy dog. " * 20, "a fox"), []
    sizes = {"context": 60, "continuation": 8, "windows": 2, "conversations": 3, "conversation_tokens": 150}
    specs = ["full", "h2o:0.3"]
    found = measure_quality(lm, specs, text, **sizes, progress=lambda what, share: told.append((share, what)))
    assert list(found) == specs
    for spec, one in found.items():
        assert (one.reference, one.dtype, one.question, one.turns) == ("full", "float32", "after", "one-prefill")
        assert one.text_sha256 == text.sha256 and one.context_tokens == 60
        assert one.kl.n == one.top1.n == one.perplexity.n == 16 and one.recall.n == 3
        assert (one.kl.value == 0) == (spec == "full")
        assert one.realised.kept.value == (1.0 if spec == "full" else pytest.approx(0.28, abs=0.02))
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    assert {what for _, what in told} >= {"continuation: h2o:0.3", "recall: full"}
    assert measure_quality(lm, specs, text, **sizes) == found, "and again the same"


def test_quality_needs_a_tokenizer() -> None:
    with pytest.raises(UserError, match="tokenizer"):
        measure_quality(lm_of("llama"), ["full"], Text("words " * 100, "words"))


@pytest.mark.real
def test_the_default_model_forgets_what_was_evicted() -> None:
    """The study's finding, in small: full recalls, sinks and a window do not, the exact best keys do."""
    from kvatlas.model.load import load_model

    torch.set_num_threads(2)
    loaded = load_model("smollm2")
    found = recall(LM(loaded.model, loaded.tokenizer), ["full", "streaming:0.1", "oracle:0.1"], n=6, tokens=200)
    assert found["full"].hits >= 5
    assert found["streaming:0.1"].hits <= 1
    assert found["oracle:0.1"].hits >= 4
