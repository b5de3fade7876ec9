"""`kvatlas quality`: points of curves, tasks and their options, resuming, failures, the same numbers in any company."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import here
from sentences import word_tokenizer
from tiny import tiny_model

import kvatlas
from kvatlas.errors import UserError
from kvatlas.quality.battery_tasks import make_task
from kvatlas.quality.cell import QualityRecord
from kvatlas.quality.cells import read_cells
from kvatlas.quality.drift import FidelityTask, bins
from kvatlas.quality.statistics import mcnemar
from kvatlas.study import battery_run, child, tasks
from kvatlas.study.battery import chosen_tasks, points
from kvatlas.study.child import ChildFailed

Cli = Callable[..., tuple[int, str, str]]
TASKS = ("--tasks", "fidelity,retention", "--context", 60, "--read", 20, "--tokens", "300", "--limit", 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "words"
    torch.manual_seed(0)
    tiny_model("llama", vocab_size=3000, max_position_embeddings=2048).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return here(capfd, monkeypatch)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The battery's process is this one; the list says which jobs it was given."""
    jobs: list[dict[str, Any]] = []

    def run(self: child.Workers, task: str, job: dict[str, Any], timeout: float, progress: Any) -> Any:
        jobs.append(job)
        return json.loads(json.dumps(tasks.TASKS[task](json.loads(json.dumps(job)), progress)))

    monkeypatch.setattr(child.Workers, "run", run)
    yield jobs


def options(model: Path, out: Path, strategies: str = "h2o,quest", *more: object) -> tuple[object, ...]:
    return (
        "quality",
        "--model",
        model,
        "-s",
        strategies,
        "--budgets",
        "1.0,0.2",
        *TASKS,
        "--out",
        out,
        "--threads",
        1,
        *more,
    )


def cells(folder: Path) -> dict[tuple[str, str], QualityRecord]:
    records, warnings = read_cells(folder)
    assert not warnings
    return {(r.task.name, r.strategy.normalised): r for r in records}


# ------------------------------------------------------------------------------ points and tasks


def test_points_of_curves() -> None:
    made = points("h2o,h2o:sinks=2,snapkv+int4,int8,recall:0.15,full", "1.0,0.3,64,1")
    assert [(p.spec, p.family, p.budget) for p in made] == [
        ("full", "full", None),
        ("h2o:1.0", "h2o", 1.0),
        ("h2o:0.3", "h2o", 0.3),
        ("h2o:64", "h2o", 64),
        ("h2o:1", "h2o", 1),
        ("h2o:1.0,sinks=2", "h2o:sinks=2", 1.0),
        ("h2o:0.3,sinks=2", "h2o:sinks=2", 0.3),
        ("h2o:64,sinks=2", "h2o:sinks=2", 64),
        ("h2o:1,sinks=2", "h2o:sinks=2", 1),
        ("snapkv:1.0+int4", "snapkv+int4", 1.0),
        ("snapkv:0.3+int4", "snapkv+int4", 0.3),
        ("snapkv:64+int4", "snapkv+int4", 64),
        ("snapkv:1+int4", "snapkv+int4", 1),
        ("int8", "int8", None),
        ("recall:0.15", "recall", 0.15),
    ]
    assert isinstance(made[3].budget, int) and isinstance(made[1].budget, float)


def test_a_point_that_lies_on_a_curve_is_measured_once() -> None:
    assert [p.spec for p in points("h2o,h2o:0.3,h2o:0.4", "0.3")] == ["full", "h2o:0.3", "h2o:0.4"]
    assert {p.family for p in points("h2o,h2o:0.4", "0.3")} == {"full", "h2o"}


@pytest.mark.parametrize(
    ("strategies", "budgets", "says"),
    [("hh2o", "0.3", "h2o"), ("h2o", "0", "--budgets"), ("h2o", "2.5", "whole"), ("h2o", "", "no budgets"),
     ("", "0.3", "no strategies"), ("h2o", "x", "not a number")],
)  # fmt: skip
def test_points_that_cannot_be(strategies: str, budgets: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        points(strategies, budgets)


def test_tasks_get_their_own_options() -> None:
    made = chosen_tasks("reasoning,needle,retention", {"shots": 3, "tokens": "512", "turns": "live", "read": None})
    assert list(made)[:2] == ["hellaswag", "piqa"] and len(made) == 8
    assert made["boolq"] == {"shots": 3} and made["needle"] == {"tokens": "512"}
    assert made["retention"] == {"tokens": "512", "turns": "live"}
    assert chosen_tasks("piqa", {})["piqa"] == {"shots": 5}


@pytest.mark.parametrize(
    ("names", "given", "says"),
    [("retentoin", {}, "retention"), ("", {}, "no tasks"), ("fidelity", {"shots": 2}, "--shots means nothing")],
)
def test_tasks_that_cannot_be(names: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        chosen_tasks(names, given)


# ------------------------------------------------------------------------------------- the battery


def test_a_battery_in_its_own_process(model: Path, tmp_path: Path, cli: Cli) -> None:
    """Every cell is written, the page and the block are there, and a second run has nothing to do."""
    code, out, err = cli(*options(model, tmp_path, "h2o"))
    assert code == 0, err
    made = cells(tmp_path)
    assert set(made) == {(t, s) for t in ("fidelity", "retention") for s in ("full", "h2o:1.0", "h2o:0.2")}
    for record in made.values():
        assert record.status == "ok" and record.footprint is not None and record.seconds > 0
        assert record.footprint.device.value > 0 and len(record.samples) == (6 if record.task.name == "fidelity" else 3)
    full, small = made["fidelity", "full"], made["fidelity", "h2o:0.2"]
    assert full.figures["kl"].value == 0 and full.figures["top1"].value == 1
    assert small.figures["kl"].value > 0 and small.family == "h2o" and small.budget == 0.2
    assert small.footprint.kept.value < 0.3 < full.footprint.kept.value  # type: ignore[union-attr]
    assert (tmp_path / "quality.html").is_file() and "recalled" in out and "to go" in err
    assert not (tmp_path / ".partial").exists()
    code, _, err = cli(*options(model, tmp_path, "h2o"))
    assert code == 0 and "nothing is missing" in err and cells(tmp_path) == made
    code, out, err = cli("match", tmp_path, "--metric", "fidelity", "--within", 5)
    assert code == 0 and "h2o" in out, err


def test_same_numbers_whatever_runs_beside(model: Path, tmp_path: Path, cli: Cli, inside: list[dict[str, Any]]) -> None:
    """To the last digit: alone, together, and one cell after a kill."""
    for strategies, folder in (("h2o,quest", "both"), ("quest", "one")):
        assert cli(*options(model, tmp_path / folder, strategies))[0] == 0
    both, one = cells(tmp_path / "both"), cells(tmp_path / "one")
    for key, record in one.items():
        assert [s.metrics for s in record.samples] == [s.metrics for s in both[key].samples], key
    lost = next(p for p in (tmp_path / "both").glob("retention-h2o-0.2*.json"))
    lost.unlink()
    assert cli(*options(model, tmp_path / "both"))[0] == 0
    again = cells(tmp_path / "both")
    assert [key for key in both if both[key] != again[key]] == [("retention", "h2o:0.2")]
    key = "retention", "h2o:0.2"
    assert again[key].samples == both[key].samples and again[key].figures == both[key].figures


def test_a_strategy_that_fails_costs_no_other(
    model: Path, tmp_path: Path, cli: Cli, inside: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FidelityTask.run

    def fails(self: FidelityTask, lm: Any, specs: list[str], *rest: Any) -> Any:
        if "h2o:0.2" in specs:
            raise RuntimeError("no such luck")
        return run(self, lm, specs, *rest)

    monkeypatch.setattr(FidelityTask, "run", fails)
    code, _, _ = cli(*options(model, tmp_path))
    made = cells(tmp_path)
    bad = made.pop(("fidelity", "h2o:0.2"))
    assert code == 1 and bad.status == "failed" and "no such luck" in str(bad.error)
    assert all(record.status == "ok" for record in made.values()) and len(made) == 9
    assert cli(*options(model, tmp_path))[0] == 1 and cells(tmp_path)["fidelity", "h2o:0.2"].status == "failed"
    monkeypatch.undo()
    monkeypatch.setattr(child.Workers, "run", lambda self, task, job, *_: tasks.TASKS[task](job, lambda *_: None))
    assert cli(*options(model, tmp_path, "h2o,quest", "--retry"))[0] == 0
    assert cells(tmp_path)["fidelity", "h2o:0.2"].status == "ok"


def test_a_process_that_is_killed_is_started_again(
    model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its task's strategies are run one by one; the one that ends the process even so is recorded."""
    jobs = []

    def run(self: child.Workers, task: str, job: dict[str, Any], timeout: float, progress: Any) -> Any:
        jobs.append(json.loads(json.dumps(job)))

        def watch(share: float, text: str) -> None:
            progress(share, text)
            name, _, rest = text.partition("|")
            if name == "fidelity" and rest.startswith(("|h2o:0.2", "h2o:0.2|")):
                raise ChildFailed("out_of_memory", "killed by the system")

        return tasks.TASKS[task](job, watch)

    monkeypatch.setattr(child.Workers, "run", run)
    monkeypatch.setattr("kvatlas.study.battery_task.Exception", ValueError, raising=False)
    code, _, err = cli(*options(model, tmp_path))
    made = cells(tmp_path)
    assert code == 1, err
    assert made["fidelity", "h2o:0.2"].status == "out_of_memory" and len(made) == 10
    assert [job["apart"] for job in jobs] == [[], ["fidelity"], ["fidelity"]] and len(jobs[2]["lost"]) == 1


def test_what_ends_before_any_task_is_said(
    model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: child.Workers, *_: Any) -> Any:
        raise ChildFailed("failed", "no room")

    monkeypatch.setattr(child.Workers, "run", run)
    code, _, err = cli(*options(model, tmp_path))
    assert code == 2 and "could not be started: no room" in err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--limit", 0), "--limit must be 1"),
        (("--tasks", "hellaswg"), "did you mean 'hellaswag'"),
        (("--tasks", "hellaswag,fidelity,retention", "--data-dir", "nowhere"), "nowhere"),
        (("--tokens", "9000"), "9"),
        (("--turns", "often"), "often"),
        (("--dtype", "int3"), "--dtype"),
        (("--context", 1), "fidelity needs"),
        (("--read", 3000), "3"),
        (("--json", "/nowhere/x.json"), "no folder"),
        (("--json", "/"), "is a folder"),
    ],
)
def test_bad_input_is_one_line(
    model: Path, tmp_path: Path, cli: Cli, inside: list[dict[str, Any]], more: tuple[object, ...], says: str
) -> None:
    code, out, err = cli(*options(model, tmp_path / "out", "h2o", *more))
    last = err.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and says in last and not out
    assert not list(tmp_path.glob("out/*.json"))


def test_match_wants_cells(tmp_path: Path, cli: Cli) -> None:
    assert cli("match", tmp_path)[0] == 2
    assert "nowhere" in cli("match", tmp_path / "nowhere")[2]


def test_the_course_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(battery_run.time, "monotonic", lambda: now[0])
    course = battery_run.BatteryCourse()
    course.move(0.0, "loading the model")
    now[0] = 110.0
    assert course.left() is None and "loading the model · 0:10 so far" in course.words()
    course.move(0.001, "retention||prefill")
    now[0] = 130.0
    course.move(0.25, "retention||h2o:0.3")
    assert (
        course.left() == pytest.approx(60.0)
        and "[ 25%] retention: h2o:0.3 · 0:30 so far, about 1:00 to go" in course.words()
    )


@pytest.mark.parametrize(("read", "want"), [(5, [(0, 5)]), (16, [(0, 16)]), (70, [(0, 16), (16, 64), (64, 70)])])
def test_bins_of_positions(read: int, want: list[tuple[int, int]]) -> None:
    assert bins(read) == want


def test_wrong_options_are_said_before_the_model_is_loaded(
    model: Path, tmp_path: Path, cli: Cli, inside: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "model_of", lambda *_: pytest.fail("the model was loaded"))
    code, _, told = cli(*options(model, tmp_path / "out", "h2o", "--turns", "two"))
    assert code == 2 and "unknown turns 'two'" in told and "loading" not in told
    assert not (tmp_path / "out").exists()


def test_stopping_says_whether_anything_is_kept(
    model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(child.Workers, "run", stop)
    code, _, told = cli(*options(model, tmp_path / "out"))
    assert code == 130 and told.rstrip().endswith("stopped; nothing was finished yet")
    (tmp_path / "out" / ".partial").mkdir(parents=True)
    code, _, told = cli(*options(model, tmp_path / "out"))
    assert code == 130 and f"is kept in {tmp_path / 'out'}" in told


@pytest.mark.real
def test_told_facts_go_with_the_cache() -> None:
    """`full` gives them back; with one token in twenty kept by chance they are gone: answers come from the cache."""
    lm = kvatlas.load("smollm2", dtype="float32")
    task = make_task("retention", tokens="256,512")
    found = task.run(lm, ["full", "random:0.05", "quest:0.5"], 12, 0, None)
    hits = {spec: [sample.metrics["recalled"] for sample in one.samples] for spec, one in found.items()}
    assert sum(hits["full"]) >= 11 and sum(hits["quest:0.5"]) >= 8
    lost = sum(a > b for a, b in zip(hits["full"], hits["random:0.05"]))
    assert mcnemar(lost, sum(a < b for a, b in zip(hits["full"], hits["random:0.05"]))) < 0.01
    kept = [footprint.kept for footprint in found["random:0.05"].footprints]
    assert max(kept) < 0.12 and all(footprint.kept == 1 for footprint in found["full"].footprints)
