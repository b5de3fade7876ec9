"""Sessions: turns and answers in one cache, forks that do not disturb each other, files; and what rules do in turns."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folders import here, tiny_folder
from specs import ARCHS, LOSSLESS, lm_of, prompts, served
from tiny import VOCAB, tiny_model

import kvatlas
from kvatlas.engine.cache import KVCache
from kvatlas.engine.lm import LM
from kvatlas.engine.session import Session
from kvatlas.errors import UserError
from kvatlas.strategy.place.paged import PagedStore

FIRST, SECOND, THIRD = prompts(40, 33, 21, seed=5)
KEEPS_ALL = (
    *LOSSLESS,
    "snapkv:1000",
    "scissorhands:1000",
    "alisa:1000",
    "quest:1000",
    "quest:1000+paged",
    "pqcache:1000",
    "recall:0.3,pages=1000",
    "recall:8,pages=1000,page=4",
    "blockcache",
    "full:prefill=chunked:7",
    "h2o:1000,prefill=chunked:7",
    "quest:1000,prefill=chunked:7",
    "recall:0.3,pages=1000,prefill=chunked:7",
    "infinigen:1.0,alpha=inf,prefill=chunked:7",
)
EVICTS = ("h2o:0.3", "streaming:0.3", "random:0.3", "scissorhands:0.3,history=5", "alisa:0.3,history=5", "snapkv:0.3")


def conversation(session: Session, answer: int = 6) -> list[list[int]]:
    """Three turns and their answers."""
    answers = []
    for turn in (FIRST, SECOND, THIRD):
        session.append(turn)
        answers.append(session.generate(answer, stop=()).ids)
    return answers


def one_prefill_each(arch: str, answer: int = 6) -> list[list[int]]:
    """The same answers, every token of them from a prefill of all before it."""
    lm, tokens, answers = lm_of(arch), list[int](), []
    for turn in (FIRST, SECOND, THIRD):
        tokens += turn
        for _ in range(answer):
            tokens.append(int(lm.prefill(lm.new_cache("full"), [tokens], 1).argmax(-1)))
        answers.append(tokens[-answer:])
    return answers


# ------------------------------------------------------------------------------ turns


@pytest.mark.parametrize("spec", KEEPS_ALL)
def test_turns_are_one_long_prompt_where_all_is_kept(spec: str) -> None:
    """Every answer is what a single prefill of all that came before it gives."""
    assert conversation(lm_of("llama").session(spec)) == one_prefill_each("llama")


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "llama"])
def test_turns_on_other_architectures(arch: str) -> None:
    want = one_prefill_each(arch)
    for spec in served(arch, ("full", "paged", "quest:1000", "recall:0.3,pages=1000", "infinigen:1.0,alpha=inf")):
        assert conversation(lm_of(arch).session(spec)) == want, spec


@pytest.mark.parametrize("spec", EVICTS)
def test_every_turn_evicts_to_the_first_ones_budget(spec: str) -> None:
    """(snapkv votes once: later turns and answers stay.) Positions are distinct, and the newest is among them."""
    session, seen, later = lm_of("llama").session(spec), 0, 0
    for turn in (FIRST, SECOND, THIRD):
        seen += session.append(turn)
        later += len(turn) if turn is not FIRST else 0
        for layer in session.cache.layers:
            kept = layer.kept_positions()[0]
            assert kept.shape[1] == 12 + (later if spec == "snapkv:0.3" else 0)
            assert all(len(set(head.tolist())) == kept.shape[1] for head in kept)
            assert int(kept.max()) == seen - 1 and int(kept.min()) >= 0
        answer = session.generate(6, stop=())
        seen, later = seen + len(answer.ids), later + len(answer.ids)
        assert session.cache.seen.tolist() == [seen] == [len(session.tokens)]


@pytest.mark.parametrize("spec", [*EVICTS, "recall:0.3", "h2o:0.3+quest:0.5", "infinigen:0.4,pool=0.5"])
def test_a_turn_in_chunks_is_the_turn(spec: str) -> None:
    """However a later turn comes in: what stays of it, and the logits after it."""
    lm = lm_of("llama")
    caches = [lm.new_cache(s) for s in (spec, f"{spec},prefill=chunked:8")]
    last = [lm.prefill(cache, [FIRST], 4) for cache in caches]
    for turn in (SECOND, THIRD):
        for _ in range(3):
            last = [lm.step(cache, logits.argmax(-1)) for cache, logits in zip(caches, last)]
        last = [lm.extend(cache, 0, turn) for cache in caches]
        torch.testing.assert_close(*last, atol=1e-4, rtol=1e-4)
        for whole, chunked in zip(*(cache.layers for cache in caches)):
            assert torch.equal(whole.kept_positions()[0], chunked.kept_positions()[0])


def test_scores_in_later_turns() -> None:
    """h2o's mass grows by what a turn's queries give, over what is kept: each layer's grows by their number."""
    cache = lm_of("llama").new_cache("h2o:1000")
    lm = lm_of("llama")
    lm.prefill(cache, [FIRST], 4)
    lm.extend(cache, 0, SECOND)
    for layer in cache.layers:
        mass = layer.store.column("score")[0, :, :73]
        torch.testing.assert_close(mass.sum(-1), torch.full((2,), 73.0), atol=1e-3, rtol=0)
    cache = lm.new_cache("scissorhands:0.3,history=5")
    lm.prefill(cache, [FIRST], 4)
    for turn in (SECOND, THIRD):
        lm.extend(cache, 0, turn)
        for layer in cache.layers:
            ring, hits = layer.store.column("ring"), layer.store.column("hits")
            bits = sum((ring >> i) & 1 for i in range(8)).sum(-1)
            assert torch.equal(bits.float(), hits) and float(hits.max()) <= 5


def test_page_bounds_follow_when_slots_move() -> None:
    """A turn closes the holes of all sequences of a batch; no key is outside the bounds of its page afterwards."""
    lm, page = lm_of("llama"), 4
    cache = lm.new_cache(f"h2o:0.5+quest:0.5,page={page}")
    logits = lm.prefill(cache, prompts(40, 23, 31), 8)
    for _ in range(7):
        logits = lm.step(cache, logits.argmax(-1))
    lm.extend(cache, 1, THIRD)
    for layer in cache.layers[2:]:
        assert not layer.store.holes
        keys, of = layer.store.keys(), torch.arange(layer.store.filled) // page
        low, high = (layer.state[name][:, :, of] for name in ("low", "high"))
        inside = ((keys >= low) & (keys <= high)).all(-1)
        assert bool((inside | (torch.arange(layer.store.filled) >= layer.store.lengths.unsqueeze(-1))).all())


def test_what_is_evicted_in_turns_goes_to_the_archive() -> None:
    session = lm_of("llama").session("recall:0.3")
    conversation(session)
    session.append(FIRST)
    for layer in session.cache.layers:
        assert layer.held_tokens() == 12 and layer.archived_tokens() == len(session.tokens) - 12


def test_a_turn_of_one_sequence_leaves_the_others_alone() -> None:
    """In a batch whose sequences have turns of their own."""
    lm, ids = lm_of("llama"), prompts(40, 23, 31)
    for spec in ("full", "paged", "h2o:0.3", "quest:0.3", "recall:0.3", "infinigen:0.3", "pqcache:0.3"):
        together = lm.new_cache(spec)
        lm.prefill(together, ids, 4)
        after = torch.cat([lm.extend(together, row, SECOND[: 9 * row + 5]) for row in (0, 2)])
        token = torch.stack([after[0], after[0], after[1]]).argmax(-1)
        logits = [lm.step(together, token) for _ in range(3)][-1]
        for row in range(3):
            alone = lm.new_cache(spec)
            lm.prefill(alone, [ids[row]], 4)
            if row != 1:
                lm.extend(alone, 0, SECOND[: 9 * row + 5])
            want = [lm.step(alone, token[row : row + 1]) for _ in range(3)][-1]
            torch.testing.assert_close(logits[row], want[0], atol=1e-3, rtol=1e-3, msg=f"{spec} {row}")


# ---------------------------------------------------------------------------- answers


def test_answers_are_generates() -> None:
    """The first answer is ``generate``'s, greedy, sampled and stopped; going on is as if it had not ended."""
    lm = lm_of("llama")
    for options in ({}, {"temperature": 0.9, "top_p": 0.8, "seed": 3}):
        session = lm.session("h2o:0.5")
        assert session.append(FIRST) == 40
        mine, want = session.generate(8, **options), lm.generate([FIRST], "h2o:0.5", max_new_tokens=8, **options)[0]
        assert mine == want and mine.prompt_tokens == 40 and session.tokens == FIRST + mine.ids
    session = lm.session()
    session.append(FIRST)
    long = lm.generate([FIRST], max_new_tokens=9)[0].ids
    assert session.generate(4).ids + session.generate(5).ids == long
    stopped = lm.session()
    stopped.append(FIRST)
    answer = stopped.generate(9, stop=[long[3]])
    assert answer.finish == "stop" and answer.ids == long[: long.index(long[3])]
    assert stopped.tokens == FIRST + answer.ids, "the stop token is not in the cache"
    assert stopped.generate(9 - len(answer.ids), stop=()).ids == long[len(answer.ids) :]


def test_an_answer_that_is_broken_off_is_in_the_cache_so_far() -> None:
    from kvatlas.engine.sampling import Sampling

    lm, session = lm_of("llama"), lm_of("llama").session()
    session.append(FIRST)
    stream = session.stream(20, Sampling(), set())
    begun = [next(stream) for _ in range(3)]
    stream.close()
    assert session.tokens == FIRST + begun and session.cache.seen.tolist() == [43]
    assert begun + session.generate(4).ids == lm.generate([FIRST], max_new_tokens=7)[0].ids


# ------------------------------------------------------------------------------- forks


@pytest.mark.parametrize(
    "spec",
    [
        "full",
        "h2o:0.3",
        "paged",
        "quest:0.3+paged",
        "host",
        "infinigen:0.3",
        "recall:0.3",
        "snapkv:0.3+int4",
        "blockcache",
    ],
)
def test_forks_do_not_disturb_each_other(spec: str) -> None:
    """Turns and answers in turns, in the fork, the fork's fork and the first: each as if it were alone."""
    lm = lm_of("llama")

    def alone(*turns: list[int]) -> list[list[int]]:
        session, answers = lm.session(spec), []
        for turn in (FIRST, *turns):
            session.append(turn)
            answers.append(session.generate(4, stop=()).ids)
        return answers

    first = lm.session(spec)
    first.append(FIRST)
    begun = first.generate(4, stop=()).ids
    answers = {name: [begun] for name in ("first", "second", "third")}
    second = first.fork()
    second.append(SECOND)
    third = second.fork()
    first.append(THIRD)
    for _ in range(2):
        for session, name in ((first, "first"), (second, "second"), (third, "third")):
            answers[name].append(session.generate(2, stop=()).ids)
    assert answers["first"][1] + answers["first"][2] == alone(THIRD)[1]
    assert answers["second"][1] + answers["second"][2] == alone(SECOND)[1] == answers["third"][1] + answers["third"][2]
    assert first.tokens[:44] == second.tokens[:44] and first.tokens != second.tokens
    assert not _storages(first.cache) & _storages(second.cache) or spec.endswith("paged")


@pytest.mark.parametrize("spec", ["paged", "h2o:0.3", "quest:0.5+paged"])
def test_forks_where_layers_have_windows_of_their_own(spec: str) -> None:
    lm = lm_of("gemma3")
    first, alone = lm.session(spec), lm.session(spec)
    for session in (first, alone):
        session.append(FIRST)
    fork = first.fork()
    first.append(THIRD)
    for session in (fork, alone):
        session.append(SECOND)
    first.generate(5)
    assert fork.generate(8).ids == alone.generate(8).ids


def _storages(cache: KVCache) -> set[int]:
    """Where the tensors of a cache are."""
    held: list[torch.Tensor] = []
    for layer in cache.layers:
        held += [*layer.state.values(), layer.seen, *layer.plan.values()]
        for store in (layer.store, layer.archive):
            if store is not None:
                held += [store.lengths, *getattr(store, "data", getattr(store, "pools", {})).values()]
    return {tensor.untyped_storage().data_ptr() for tensor in held if tensor.numel()}


def test_a_paged_fork_shares_blocks_until_one_is_written() -> None:
    """One pool; a fork adds blocks only for what it writes, and gives them back when it goes."""
    lm = lm_of("llama")
    first = lm.session("paged:block=4")
    first.append(FIRST[:38])  # nine full blocks and half a one
    store = first.cache.layers[0].store
    assert isinstance(store, PagedStore)
    before = store.table.used - len(store.table.free)
    forks = [first.fork() for _ in range(5)]
    pool = first.cache.layers[0].store.table.root

    def in_use() -> int:
        return pool.used - len(pool.free)

    assert in_use() == before == 10
    assert all(f.cache.layers[2].store.pools is first.cache.layers[2].store.pools for f in forks)
    for i, fork in enumerate(forks):
        fork.append(SECOND[i : i + 2])
    assert in_use() == before + 5, "the half block, for each that went on"
    want = lm.session("paged:block=4")
    want.append(FIRST[:38])
    want.append(SECOND[3:5])
    ids = want.generate(9, stop=()).ids
    assert forks[3].generate(9, stop=()).ids == ids
    survivor = forks[3]
    del forks, fork, first, store
    gc.collect()
    assert in_use() == -(-(40 + 9) // 4), "blocks of those that are gone are free, the first one's too"
    assert survivor.generate(9, stop=()).ids == want.generate(9, stop=()).ids
    assert (pool.refs[: pool.used] <= 1).all()


def test_forks_of_an_empty_session() -> None:
    lm = lm_of("llama")
    session = lm.session("h2o:0.5")
    fork = session.fork()
    fork.append(FIRST)
    assert session.tokens == [] and not session.cache.started
    session.append(SECOND)
    assert fork.generate(4).ids == lm.generate([FIRST], "h2o:0.5", max_new_tokens=4)[0].ids


# ------------------------------------------------------------------------------- files


@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "paged", "infinigen:0.3", "recall:0.3", "snapkv:0.3+quest:0.5"])
def test_a_saved_session_goes_on(spec: str, tmp_path: Path) -> None:
    lm = lm_of("llama")
    session = lm.session(spec, beyond_trained=True)
    session.append(FIRST)
    session.generate(5, stop=())
    session.save(tmp_path / "talk.kv")
    loaded = Session.load(tmp_path / "talk.kv", LM(tiny_model("llama")))
    assert loaded.tokens == session.tokens and loaded.strategy == session.strategy and loaded.beyond_trained
    for each in (session, loaded):
        each.generate(3, stop=())
        each.append(SECOND)
        each.generate(5, stop=())
    assert loaded.tokens == session.tokens and loaded.bytes().device_payload == session.bytes().device_payload
    cache = kvatlas.load_cache(tmp_path / "talk.kv", lm)
    assert cache.seen.tolist() == [45], "a session's cache is a cache"


def test_a_cache_is_no_session(tmp_path: Path) -> None:
    lm = lm_of("llama")
    cache = lm.new_cache("full")
    lm.prefill(cache, [FIRST], 2)
    kvatlas.save_cache(cache, tmp_path / "x")
    with pytest.raises(UserError, match=r"holds a cache and no session; load it with kvatlas.load_cache"):
        Session.load(tmp_path / "x", lm)
    with pytest.raises(UserError, match="is empty; append a turn before it is saved"):
        lm.session().save(tmp_path / "x")


# -------------------------------------------------------------------------- bad input


def test_clear_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = lm_of("llama")
    session = lm.session()
    with pytest.raises(UserError, match="the session is empty; append a turn"):
        session.generate(4)
    for turn in ([], [VOCAB], 7):
        with pytest.raises(UserError, match="the turn"):
            session.append(turn)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no tokenizer"):
        session.append("words")
    session.append(prompts(500)[0])
    for call in (lambda: session.append(FIRST), lambda: session.generate(13, stop=())):
        with pytest.raises(UserError, match="the model has 512 positions"):
            call()
    assert len(session.tokens) == 500 and len(session.generate(12, stop=()).ids) == 12
    with pytest.raises(UserError, match="unknown strategy"):
        lm.session("nonsense")
    blind = lm.session("full:prefill=chunked-isolated:8")
    blind.append(FIRST)
    with pytest.raises(UserError, match="blind to each other"):
        blind.append(SECOND)
    broken = lm.session()
    broken.append(FIRST)
    monkeypatch.setattr(type(broken.cache.layers[2]), "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.generate(2)
    for call in (lambda: broken.append(SECOND), broken.fork, lambda: broken.generate(1), lambda: broken.save("x")):
        with pytest.raises(UserError, match="interrupted in the middle of a turn"):
            call()


# ------------------------------------------------------------------------------- chat


class Tokenizer:
    """A letter is a token; chat turns are between < and >, a word of the role first."""

    chat_template, bos_token_id, eos_token_id = "yes", None, None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str:
        text = "".join(f"<{m['role'][0]}:{m['content']}>\n" for m in messages)
        return text + "<a:" * add_generation_prompt


def test_turns_in_the_chat_template() -> None:
    """Each turn is what the template puts between an answer and the next one, so that the whole is the template's."""
    lm = LM(tiny_model("llama"), Tokenizer())
    session = lm.session(system="be short")
    session.append("hello", chat=True)
    first = session.generate(3, stop=())
    session.append("why", chat=True)
    said = "".join(map(chr, session.tokens))
    assert said == f"<s:be short>\n<u:hello>\n<a:{first.text}>\n<u:why>\n<a:"
    plain = lm.session()
    assert plain.append("some text") == 10 and plain.append(" and more") == 9, "a text begins only once"
    plain.append("hi", chat=True)
    assert "".join(map(chr, plain.tokens[1:])) == "some text and more<u:hi>\n<a:"
    for turn in ("", [1, 2]):
        with pytest.raises(UserError, match="is text, and not empty"):
            plain.append(turn, chat=True)
    lm.tokenizer.apply_chat_template = lambda messages, **_: str(len(messages))
    with pytest.raises(UserError, match="changes earlier turns"):
        plain.append("hi", chat=True)
    with pytest.raises(UserError, match="no chat template"):
        LM(tiny_model("llama"), SimpleNamespace()).session().append("hi", chat=True)


# --------------------------------------------------------------------------- the command


def test_generate_saves_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two commands say is what one session says; with -n 0 only the prompt is saved."""
    model, file = tiny_folder(tmp_path / "tiny"), tmp_path / "talk.kv"
    run = here(capfd, monkeypatch)
    common = ("--model", model, "--dtype", "float32", "--threads", "1", "-n", "6")
    first = run("generate", "Once upon", *common, "-s", "h2o:0.5", "--save-cache", file, "--stats")
    second = run("generate", " a time", *common, "--load-cache", file, "--stats")
    again = run("generate", " a time", *common, "--load-cache", file, "-s", "h2o:0.50", "--save-cache", file)
    assert [first[0], second[0], again[0]] == [0, 0, 0] and second[1] == again[1]
    assert "h2o:0.5: 9 prompt tokens, 6 new" in first[2]
    assert "h2o:0.5: 7 prompt tokens after 15 saved ones, 6 new" in second[2]
    session = kvatlas.load(str(model), dtype="float32").session("h2o:0.5")
    for turn, out in (("Once upon", first[1]), (" a time", second[1])):
        session.append(turn)
        assert session.generate(6).text + "\n" == out
    assert Session.load(file, session.lm).tokens == session.tokens
    code, out, err = run("generate", "A context.", *common, "-n", "0", "--save-cache", tmp_path / "context")
    assert (code, out, err) == (0, "", "") and len(Session.load(tmp_path / "context", session.lm).tokens) == 10
    plain = run("generate", "A context. And more", *common)
    assert run("generate", " And more", *common, "--load-cache", tmp_path / "context") == plain

    (tmp_path / "text").write_text("no cache")
    for options, words in (
        (("--load-cache", file, "-s", "full"), "was saved under 'h2o:0.5' and cannot go on under 'full'"),
        (("--load-cache", tmp_path / "none"), "cannot be read"),
        (("--load-cache", tmp_path / "text"), "is not a file that kvatlas saved"),
        (("--load-cache", file, "--dtype", "bfloat16"), "made with dtype float32"),
        (("--save-cache", tmp_path), "is a folder; give a file"),
        (("--save-cache", tmp_path / "no" / "x"), "there is no folder"),
        (("-n", "0"), "--max-new-tokens must be 1 or more (0 with --save-cache)"),
        (("-n", "-1", "--save-cache", file), "--max-new-tokens must be 1 or more"),
    ):
        code, out, err = run("generate", "Hi", *common, *options)
        assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err
