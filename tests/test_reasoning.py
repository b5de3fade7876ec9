"""Reasoning tasks: lm-eval's own prompts and judgement on local files, and what is said of bad ones."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reasoning_data import DATA, MADE, byte_tokenizer, hub, local, write
from tiny import tiny_model

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.quality.reasoning import NAMES, reasoning_task
from kvatlas.quality.reasoning.definitions import definition, measured
from kvatlas.quality.reasoning.records import SOURCES, cleaned, file_of, read_records
from kvatlas.quality.reasoning.requests import Pair, shares

pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra 'quality')")
N = 30


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM(tiny_model("llama", max_position_embeddings=2048), byte_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    for name in MADE:
        write(made, name, local(name, range(N)))
    return made


def texts(asked: Any) -> list[list[tuple[str, str]]]:
    return [[request.args for request in one.requests] for one in asked]


# ----------------------------------------------------------------------- as lm-eval asks


def own_task(monkeypatch: pytest.MonkeyPatch, name: str, scored: range, examples: range) -> Any:
    """lm-eval's own task of this name, on records in the hub's shape instead of the hub."""
    import datasets

    from kvatlas.quality.reasoning.tasks import _own_tasks

    rows = datasets.Dataset.from_list(hub(name, scored))
    data = {"train": datasets.Dataset.from_list(hub(name, examples)), "validation": rows, "test": rows}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    return _own_tasks().load(name)["tasks"][name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shots", [0, 3])
def test_prompts_and_judgement_are_lm_evals_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, shots: int
) -> None:
    from lm_eval.api.task import ConfigurableTask

    records = read_records(name, write(tmp_path, name, local(name, range(N))))
    theirs = own_task(monkeypatch, name, range(12), range(12, N))
    ours = ConfigurableTask(config=definition(name, records[:12], records[12:]))
    assert len(theirs.eval_docs) == len(ours.eval_docs) == 12
    for task in (theirs, ours):
        task.set_fewshot_seed(seed=5)
    values = random.Random(name)
    for a, b in zip(theirs.eval_docs, ours.eval_docs):
        asked = []
        for task, doc in ((theirs, a), (ours, b)):
            text = task.fewshot_context(doc, num_fewshot=shots)
            asked.append(task.construct_requests(doc=doc, ctx=text, metadata=(name, 0, 1)))
        assert [r.args for r in asked[0]] == [r.args for r in asked[1]]
        scores = [(-values.random() * 9, False) for _ in asked[0]]
        judged = ours.process_results(b, scores)
        assert judged == theirs.process_results(a, scores)
        assert tuple(judged) == measured(name)


@pytest.mark.parametrize("name", NAMES)
def test_hub_and_files_ask_the_same(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    own_task(monkeypatch, name, range(N), range(N))
    assert texts(reasoning_task(name).samples(7, 3)) == texts(reasoning_task(name, data_dir=folder).samples(7, 3))


def test_no_hub_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def none(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", none)
    with pytest.raises(UserError, match=r"could not load .*'piqa' from the hub \(ConnectionError: no route.*data_dir"):
        reasoning_task("piqa").samples(2, 0)


def test_the_hub_is_left_alone_where_there_are_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    for name in NAMES:
        reasoning_task(name, 2, folder).samples(3, 0)


def test_hellaswag_is_cleaned_as_lm_eval_cleans_it() -> None:
    from lm_eval.tasks.hellaswag.utils import preprocess

    for text in (" [header] How to fly [title] Get  wings. [step] Go. ", "A man [x] is  here.", "Plain."):
        assert cleaned(text) == preprocess(text)


# --------------------------------------------------------------------------- which samples


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_drawn_by_seed_and_a_larger_limit_only_adds(folder: Path, name: str) -> None:
    def asked(limit: int, seed: int) -> list[list[tuple[str, str]]]:
        return texts(reasoning_task(name, 3, folder).samples(limit, seed))

    assert asked(4, 1) == asked(4, 1) == asked(9, 1)[:4]
    assert asked(4, 1) != asked(4, 2)
    plain = [one.name for one in reasoning_task(name, 0, folder).samples(4, 1)]
    assert plain == [one.name for one in reasoning_task(name, 3, folder).samples(4, 1)]
    assert len({one.name for one in reasoning_task(name, 0, folder).samples(1000, 1)}) == N


def test_examples_are_never_scored(folder: Path) -> None:
    task = reasoning_task("arc_easy", 3, folder)
    asked = task.samples(1000, 0)
    assert len(asked) == N - N // 5
    own = [one.doc["question"] for one in asked]
    for one in asked:
        text = one.requests[0].args[0]
        assert text.count("Question: ") == 4 and text.endswith(one.doc["question"] + "\nAnswer:")
        assert [q for q in own if f"Question: {q}\n" in text] == [one.doc["question"]]


def test_about_says_what_makes_the_results(folder: Path, tmp_path: Path) -> None:
    about = reasoning_task("piqa", 5, folder).about()
    assert (about["shots"], about["data"]) == (5, "valid.jsonl")
    assert json.loads(json.dumps(about)) == about
    other = local("piqa", range(N))
    other[3]["label"] = 1 - other[3]["label"]
    write(tmp_path, "piqa", other)
    assert reasoning_task("piqa", 5, tmp_path).about()["sha256"] != about["sha256"], "labels count too"
    assert reasoning_task("piqa").about()["data"] == "hub"


# ----------------------------------------------------------------------------- as questions


def test_choices_share_a_context_and_so_do_contexts_that_begin_alike() -> None:
    same = [Pair((1, 2, 3, 4), (5,)), Pair((1, 2, 3, 4), (6, 7))]
    (share,) = shares("s", same)
    assert (share.question.context, share.numbers) == ((1, 2, 3, 4), (0, 1))
    assert [(c.tokens, c.unscored) for c in share.question.choices] == [((5,), 0), ((6, 7), 0)]
    (share,) = shares("s", [Pair((1, 2, 3, 4, 5), (9,)), Pair((1, 2, 3, 8), (9,))])
    assert share.question.context == (1, 2, 3)
    assert [(c.tokens, c.unscored) for c in share.question.choices] == [((4, 5, 9), 2), ((8, 9), 1)]
    little = shares("s", [Pair((1, 2, 3, 4, 5), (9,)), Pair((1, 2, 8), (9,))])
    assert [s.question.context for s in little] == [(1, 2, 3, 4, 5), (1, 2, 8)], "less than half in common"
    apart = shares("s", [Pair((1, 2, 3, 4, 5), (9,)), Pair((1, 7, 8), (9,)), Pair((1, 2, 3, 4, 5), (6,))])
    assert [(s.question.name, s.question.context, s.numbers) for s in apart] == [
        ("s#0", (1, 2, 3, 4, 5), (0, 2)), ("s#1", (1, 7, 8), (1,))
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_scores_without_compression_are_transformers_own(lm: LM, folder: Path, name: str) -> None:
    task = reasoning_task(name, 1 if name == "piqa" else 0, folder)
    limit = N if name == "winogrande" else 4  # its record 0 begins with the blank: nothing is shared there
    found = task.run(lm, ["full", "h2o:0.5"], limit, 0, None)["full"]
    asked = task.samples(limit, 0)
    judges, _ = task._judges[asked[0].name]
    assert [sample.name for sample in found.samples] == [one.name for one in asked]
    for one, sample in zip(asked, found.samples):
        scores = [(plain(lm, *request.args), False) for request in one.requests]
        judged = judges.process_results(one.doc, scores)
        assert sample.metrics == {m.name: judged[own] for m, own in zip(task.metrics, measured(name))}
        assert sample.labels["tokens"] > 1 and sample.labels["shots"] == task.shots


@torch.no_grad()
def plain(lm: LM, context: str, continuation: str) -> float:
    ids, n = lm.tokenizer.encode(context + continuation), len(lm.tokenizer.encode(context))
    logits = lm.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(logits[i - 1, ids[i]]) for i in range(n, len(ids)))


def test_questions_and_judge_say_what_run_says(lm: LM, folder: Path) -> None:
    from kvatlas.quality.asking import ask

    task = reasoning_task("openbookqa", 2, folder)
    found = task.run(lm, ["h2o:0.3", "full"], 5, 0, None)
    assert found == task.run(lm, ["h2o:0.3", "full"], 5, 0, None)
    asked = task.questions(lm, 5, 0)
    replies = ask(lm, ["h2o:0.3"], asked)["h2o:0.3"]
    judged = [task.judge(lm, question, reply) for question, reply in zip(asked, replies)]
    assert judged == [sample.metrics for sample in found["h2o:0.3"].samples]
    assert [metric.name for metric in task.metrics] == ["accuracy", "acc_norm"]
    assert all(f.kept < 0.5 for f in found["h2o:0.3"].footprints)


# -------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("hellaswag", '{"ctx": "a", "endings": ["x", "y"]}', "no key 'label' (a record needs ctx, endings, label)"),
        ("hellaswag", '{"ctx": "a", "endings": ["x", 3], "label": 0}', "'endings' must be a list of texts"),
        ("boolq", '{"passage": "", "question": "b", "label": true}', "'passage' is empty"),
        ("openbookqa", '{"query": "a", "choices": ["x", "y"], "gold": 2}', "'gold' must be 0 to 1, not 2"),
        ("winogrande", '{"context_options": ["a"], "continuation": "b", "gold": 0}', "must be two texts"),
        ("arc_easy", '{"query": 5, "choices": ["x"], "gold": 0}', "'query' must be text, not 5"),
        ("arc_easy", "[1, 2]", "a record must be an object, not list"),
        ("rte", '{"premise": "a", "hypothesis": "b", "label": "yes"}', "'label' must be entailment or not_entailment"),
        ("copa", '{"premise": "a",', "not JSON"),
    ],
)
def test_a_bad_record_says_which_file_and_line(tmp_path: Path, name: str, line: str, says: str) -> None:
    path = write(tmp_path, name, local(name, range(5)))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], line, *lines[3:]]))
    with pytest.raises(UserError) as error:
        reasoning_task(name, 0, tmp_path).samples(2, 0)
    assert str(error.value).startswith(f"{path}, line 4: ") and says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("labels", ["0\n1\n", "0\nx\n1\n0\n1\n"])
def test_labels_that_do_not_fit(tmp_path: Path, labels: str) -> None:
    path = write(tmp_path, "piqa", local("piqa", range(5)))
    path.with_name("valid-labels.lst").write_text(labels)
    with pytest.raises(UserError, match=r"has 2 labels for the 5 records|line 2: 'label' must be a number"):
        reasoning_task("piqa", 0, tmp_path).samples(2, 0)


def test_what_cannot_be_asked_is_one_clear_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no reasoning task 'helaswag'; did you mean 'hellaswag'"):
        reasoning_task("helaswag")
    with pytest.raises(UserError, match="shots must be 0 or more, not -1"):
        reasoning_task("piqa", -1)
    with pytest.raises(UserError, match="limit must be at least 1 sample, not 0"):
        reasoning_task("piqa", 0, folder).samples(0, 0)
    with pytest.raises(UserError, match=r"no file for the task 'rte' in .*: rte\*\.jsonl"):
        reasoning_task("rte", 0, tmp_path).samples(2, 0)
    with pytest.raises(UserError, match="no folder"):
        reasoning_task("rte", 0, tmp_path / "none").about()
    with pytest.raises(UserError, match="30 records, of which 6 can be set aside for examples: too few for 6 shots"):
        reasoning_task("rte", 6, folder).samples(2, 0)
    (tmp_path / "rte.jsonl").write_text("")
    with pytest.raises(UserError, match=r"rte\.jsonl has no records"):
        reasoning_task("rte", 0, tmp_path).samples(2, 0)


def test_without_lm_eval_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'kvatlas\[quality\]'"):
        reasoning_task("piqa", 0, folder).samples(2, 0)


# -------------------------------------------------------------------------------- real data


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA} (KVATLAS_DATA names another folder)")
@pytest.mark.parametrize("name", NAMES)
def test_the_real_files_are_read_whole(name: str) -> None:
    records = read_records(name, file_of(name, DATA))
    sizes = {"hellaswag": 2000, "piqa": 1838, "boolq": 3270, "openbookqa": 500, "winogrande": 1267, "copa": 100,
             "arc_easy": 2376, "arc_challenge": 1172, "rte": 277}  # fmt: skip
    assert len(records) == sizes[name] and set(sizes) == set(SOURCES)
    asked = reasoning_task(name, 5, DATA).samples(3, 0)
    assert all(len(one.requests) == len(asked[0].requests) >= 2 for one in asked)
    if name == "winogrande":
        first = {"sentence": "Sarah was a much better surgeon than Maria so _ always got the easier cases.",
                 "option1": "Sarah", "option2": "Maria", "answer": "2"}  # fmt: skip
        assert records[0] == first
