"""`kvatlas compare` on a tiny model: records and report, resuming, failures, an end in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from folders import SMALL, apart, command, here, text_file, tiny_folder

from kvatlas.errors import UserError
from kvatlas.measure.record import Record, read_records
from kvatlas.study import child, tasks
from kvatlas.study.child import ChildFailed, Workers
from kvatlas.study.plan import Plan, make_plan
from kvatlas.study.progress import QUALITY, Course, clock

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Tasks run in this process; the list says which were, as (task, strategy) in words."""
    told: list[str] = []

    def run(self: Workers, task: str, job: dict[str, Any], *_: Any) -> Any:
        told.append(" ".join(str(word) for word in (task, job.get("strategy"), job.get("repeat")) if word is not None))
        return json.loads(json.dumps(tasks.TASKS[task](job, lambda *_: None)))

    monkeypatch.setattr(child.Workers, "run", run)
    yield told


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return here(capfd, monkeypatch)


def options(model: Path, text: Path, out: Path, *more: object) -> tuple[object, ...]:
    return ("compare", "--model", model, *SMALL, "--text", text, "--out", out, *more)


def found(folder: Path) -> dict[str, Record]:
    records, warnings = read_records(folder)
    assert not warnings
    return {record.strategy.asked: record for record in records}


# The whole way, in real processes


@pytest.fixture(scope="module")
def study(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A comparison and what its process gave."""
    out = tmp_path_factory.mktemp("study") / "new" / "folder"
    more = ("--strategies", "full,h2o:0.5", "--repeats", "2", "--json", out.parent.parent / "all.json")
    return out, apart(*options(model, text, out, *more))


def test_records_are_whole(study: tuple[Path, Any]):
    out, run = study
    assert run.returncode == 0, run.stderr
    records = found(out)
    assert set(records) == {"full", "h2o:0.5"}
    for record in records.values():
        assert record.status == "ok" and record.timing and record.memory and record.realised and record.quality
        assert record.timing.tpot.n == 2 and record.timing.step is not None and len(record.repeats) == 2
        assert record.timing.compression is not None and record.timing.compression.value <= record.timing.ttft.value
        assert record.memory.prefill_peak is not None and record.memory.prefill_peak.value > 50e6
        assert record.quality.recall is not None and record.quality.recall.n >= 20
        assert record.setting.dtype == record.quality.dtype == "float32" and record.setting.threads == 1
        assert record.workload.text == "words.txt" and record.model.layers == 4
    whole, half = records["full"], records["h2o:0.5"]
    assert whole.realised.kept.value == 1.0 and 0.4 < half.realised.kept.value < 0.6  # type: ignore[union-attr]
    assert whole.quality.kl.value == 0.0 < half.quality.kl.value  # type: ignore[union-attr]
    assert whole.memory.tiers["device"].payload == 2 * 4 * 2 * 16 * 4 * 2 * (48 + 5)  # type: ignore[union-attr]


def test_the_course_and_the_result_are_shown(study: tuple[Path, Any]):
    out, run = study
    assert "[1/5] " in run.stderr and "[5/5] quality" in run.stderr and "to go" in run.stderr
    assert "measuring 4 runs, each in a process of its own" in run.stderr
    assert "h2o:0.5" in run.stdout and "ms/step" in run.stdout and str(out / "report.html") in run.stdout
    assert "Traceback" not in run.stderr
    assert sorted(path.suffix for path in out.iterdir()) == [".html", ".json", ".json"]  # no parts are left
    assert len(json.loads((out.parent.parent / "all.json").read_text())) == 2


def test_order_is_shuffled_in_rounds(study: tuple[Path, Any]):
    repeats = {name: {r["repeat"]: r["order"] for r in record.repeats} for name, record in found(study[0]).items()}
    assert sorted(order for orders in repeats.values() for order in orders.values()) == [0, 1, 2, 3]
    assert all(orders[0] < 2 <= orders[1] for orders in repeats.values())


def test_a_second_run_does_nothing(
    study: tuple[Path, Any], model: Path, text: Path, cli: Cli, done: list[str], tmp_path: Path
):
    out, _ = study
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}
    code, shown, err = cli(*options(model, text, out, "--strategies", "h2o:0.5,full", "--repeats", "2"))
    assert code == 0 and "nothing is missing" in err and "h2o:0.5" in shown
    assert not done and before == {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}
    code, shown, _ = cli("report", out, "--out", tmp_path / "again.html")
    assert code == 0 and "h2o:0.5" in shown and (tmp_path / "again.html").stat().st_size > 100_000


def test_an_end_in_the_middle_keeps_what_is_finished(
    model: Path, text: Path, tmp_path: Path, cli: Cli, done: list[str]
):
    line = options(model, text, tmp_path, "--strategies", "full,h2o:0.5", "--repeats", "3", "--no-quality")
    run = subprocess.Popen(
        command(*line), stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job would ignore it
    )  # fmt: skip
    assert run.stderr is not None
    said = [next(run.stderr)]
    while "[1/6]" not in said[-1]:
        said.append(next(run.stderr))
    children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    rest = run.stderr.read()
    assert run.wait(timeout=30) == 130 and "stopped; what was finished is kept" in rest and "Traceback" not in rest
    _, alive = psutil.wait_procs(children, timeout=10)
    assert children and not alive
    kept = sorted((tmp_path / ".partial").iterdir())
    assert kept and not list(tmp_path.glob("*.json"))
    code, _, err = cli(*line)
    assert code == 0 and f"{len(kept)} of 6 runs are there already" in err
    assert len(done) == 1 + 6 - len(kept) and all(len(r.repeats) == 3 for r in found(tmp_path).values())


# Resuming, in this process


def test_only_what_is_missing_is_done(model: Path, text: Path, tmp_path: Path, cli: Cli, done: list[str]):
    def run(*more: object) -> list[str]:
        done.clear()
        assert cli(*options(model, text, tmp_path, *more))[0] == 0
        return sorted(done)

    one = ("--strategies", "full", "--repeats", "1")
    assert run(*one, "--no-quality") == ["measure full 0", "prepare"]
    assert found(tmp_path)["full"].quality is None
    assert run(*one) == ["prepare", "quality"] and found(tmp_path)["full"].quality is not None
    assert run("--strategies", "full,random:0.5", "--repeats", "1") == ["measure random:0.5 0", "prepare", "quality"]
    assert run("--strategies", "full", "--repeats", "2") == ["measure full 1", "prepare"]
    record = found(tmp_path)["full"]
    assert record.quality is not None and record.timing is not None and record.timing.ttft.n == 2
    assert run(*one, "--batch", "3", "--no-quality") == ["measure full 0", "prepare"]  # another workload


def test_a_failure_is_recorded_and_not_repeated(
    model: Path, text: Path, tmp_path: Path, cli: Cli, done: list[str], monkeypatch: pytest.MonkeyPatch
):
    inline = child.Workers.run

    def run(self: Workers, task: str, job: dict[str, Any], *more: Any) -> Any:
        if job.get("strategy") == "h2o:0.5":
            raise ChildFailed("out_of_memory", "needed too much")
        return inline(self, task, job, *more)

    line = options(model, text, tmp_path, "--strategies", "full,h2o:0.5", "--repeats", "2")
    monkeypatch.setattr(child.Workers, "run", run)
    code, shown, err = cli(*line)
    assert code == 0 and "out of memory: needed too much" in shown and err.count("needed too much") == 1
    assert found(tmp_path)["h2o:0.5"].status == "out_of_memory" and found(tmp_path)["full"].quality is not None
    monkeypatch.setattr(child.Workers, "run", inline)
    done.clear()
    assert cli(*line)[0] == 0 and not done
    assert cli(*line, "--retry")[0] == 0 and "measure h2o:0.5 1" in done and "quality" in done
    assert found(tmp_path)["h2o:0.5"].status == "ok"


def test_nothing_that_works_is_exit_1(
    model: Path, text: Path, tmp_path: Path, cli: Cli, done: list[str], monkeypatch: pytest.MonkeyPatch
):
    def broken(job: Any, progress: Any) -> Any:
        raise ChildFailed("failed", "no luck")

    monkeypatch.setitem(tasks.TASKS, "measure", broken)
    code, shown, _ = cli(*options(model, text, tmp_path, "--strategies", "full"))
    assert code == 1 and "no luck" in shown and found(tmp_path)["full"].status == "failed"


def test_quality_that_fails_does_not_lose_the_rest(
    model: Path, text: Path, tmp_path: Path, cli: Cli, done: list[str], monkeypatch: pytest.MonkeyPatch
):
    def broken(job: Any, progress: Any) -> Any:
        raise ChildFailed("failed", "no luck")

    monkeypatch.setitem(tasks.TASKS, "quality", broken)
    code, shown, err = cli(*options(model, text, tmp_path, "--strategies", "full", "--repeats", "1"))
    assert code == 1 and "quality could not be measured: no luck" in err and "full" in shown
    assert found(tmp_path)["full"].status == "ok"


def test_random_weights_have_no_quality(tmp_path: Path, cli: Cli, done: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvatlas.study.tasks.load_model", _small_dummy)
    line = ("compare", *SMALL, "--load-format", "dummy", "--strategies", "full", "--repeats", "1", "--out", tmp_path)
    assert cli(*line)[0] == 0 and sorted(done) == ["measure full 0", "prepare"]
    record = found(tmp_path)["full"]
    assert record.workload.text == "random token ids" and record.quality is None
    done.clear()
    assert cli(*line)[0] == 0 and not done


def _small_dummy(name: str, dtype: str, device: str, load_format: str, seed: int) -> Any:
    from kvatlas.model.load import load_model

    return load_model(name, dtype, device, load_format, seed, layers=2)


def test_beyond_trained_is_said(model: Path, text: Path, tmp_path: Path, cli: Cli, done: list[str]):
    more = ("--strategies", "full", "--repeats", "1", "--prompt-tokens", "2050", "--batch", "1", "--beyond-trained")
    code, _, err = cli(*options(model, text, tmp_path, *more))
    assert code == 0 and "quality was not measured: the prompt is longer" in err
    assert found(tmp_path)["full"].workload.beyond_trained and "quality" not in done


# Processes


def job(model: Path, **more: Any) -> dict[str, Any]:
    plan = Plan(str(model), {}, Path(), prompt_tokens=32, new_tokens=3, batch=1, quality=False)
    return {**plan.job(), "strategies": ["full"], **more}


def test_workers_survive_their_tasks(model: Path):
    with Workers("cpu", 1) as workers:
        with pytest.raises(UserError, match="did you mean 'h2o'"):
            workers.run("prepare", job(model, strategies=["h3o"]), 120)
        first = workers._server
        assert workers.run("prepare", job(model), 120)["model"]["layers"] == 4
        with pytest.raises(ChildFailed, match="KeyError") as caught:
            workers.run("nothing", job(model), 120)
        assert caught.value.status == "failed" and workers._server is first is not None
        with pytest.raises(ChildFailed) as caught:
            _kill_task_of(workers)
            workers.run("prepare", job(model, strategies=["full"] * 10_000), 120)
        assert caught.value.status == "out_of_memory" and workers._server is first
        with pytest.raises(ChildFailed, match="not done after") as caught:
            workers.run("prepare", job(model), 0.01)
        assert caught.value.status == "timeout" and workers._server is None and first.poll() is not None


def _kill_task_of(workers: Workers) -> None:
    """As the system does when memory runs out: SIGKILL for the fork that does the task, once there is one."""
    assert workers._server is not None
    server = psutil.Process(workers._server.pid)

    def kill() -> None:
        for _ in range(600):
            if forks := server.children():
                forks[0].kill()
                return
            time.sleep(0.02)

    threading.Thread(target=kill, daemon=True).start()


# Plans and progress


def plan(tmp_path: Path, strategies: str = "full", **more: Any) -> Plan:
    return make_plan(model="smollm2", strategies=strategies, out=str(tmp_path), threads=1, dtype="auto", **more)


def test_commas_separate_strategies_and_parameters(tmp_path: Path):
    made = plan(tmp_path, "full, h2o:heavy=4,recent=4,h2o:0.3,gqa=max,full:prefill=chunked:64").strategies
    assert list(made) == ["full", "h2o:heavy=4,recent=4", "h2o:0.3,gqa=max", "full:prefill=chunked:64"]


def test_what_is_asked_decides_the_record(tmp_path: Path):
    first = plan(tmp_path).asked()
    assert first == plan(tmp_path).asked() != plan(tmp_path, seed=1).asked()
    assert first == plan(tmp_path, repeats=5).asked() == plan(tmp_path, quality=False).asked()


def test_every_round_has_every_strategy(tmp_path: Path):
    cells = [(name, repeat) for name in "abcd" for repeat in range(3)]
    order = plan(tmp_path).order(cells)
    assert [sorted(name for name, _ in order[i : i + 4]) for i in (0, 4, 8)] == [list("abcd")] * 3
    assert order != cells and order == plan(tmp_path).order(cells)


def test_time_left(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("kvatlas.study.progress.time.monotonic", lambda: now[0])
    course = Course(["a", "b", "a", QUALITY])
    assert course.left() is None
    for label, seconds in (("a", 10.0), ("b", 20.0)):
        course.start(label)
        now[0] += seconds
        course.finish()
    assert course.left() == 10.0 + 15.0 * 3
    course.start("a")
    now[0] += 4.0
    assert course.left() == 6.0 + 45.0
    course.finish()
    course.start(QUALITY)
    now[0] += 5.0
    course.share = 0.25
    assert course.left() == 15.0
    assert [clock(seconds) for seconds in (None, 59.6, 3723)] == ["", "1:00", "1:02:03"]
