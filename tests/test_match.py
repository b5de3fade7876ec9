"""Matched points where the answer is known: on lines, on dips, at ends, with intervals from the samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quality_records import ACC, KL, RECALLED, TOP1, battery, cell, failed

from kvatlas.advise.against import against
from kvatlas.advise.crossing import crossings
from kvatlas.advise.curves import batteries
from kvatlas.advise.match import match
from kvatlas.errors import UserError
from kvatlas.quality.statistics import mcnemar


def share(hits: int, n: int = 100) -> list[int]:
    return [1] * hits + [0] * (n - hits)


def curve(points: dict[float | int, int], task: str = "x", family: str = "h2o", **more):
    """A family right in so many of 100 at each budget, with 1,000 bytes at budget 1."""
    return [
        cell(family, budget, task, {"acc": share(hits)}, device=1000.0 * budget, **more)
        for budget, hits in points.items()
    ]


def full(hits: int = 90, task: str = "x", **more):
    return cell("full", None, task, {"acc": share(hits)}, device=1000.0, **more)


def only(records, **how):
    table = match(records, **{"metric": "x", **how})
    assert len(table.rows) == 1
    return table.rows[0]


def test_the_point_lies_on_the_line_between_two_measured_ones():
    row = only([full(), *curve({1.0: 90, 0.5: 88, 0.3: 78, 0.1: 40})])
    assert row.status == "reached"  # 85 of 100: between 88 at 500 bytes and 78 at 300
    assert row.bytes.value == pytest.approx(300 + 200 * 7 / 10)
    assert row.share.value == pytest.approx(0.44) and row.budget.value == pytest.approx(0.44)
    assert row.bytes.low <= row.bytes.value <= row.bytes.high and row.n == 100 and row.note == ""


def test_a_point_at_the_bound_is_within():
    row = only([full(), *curve({1.0: 90, 0.5: 85, 0.3: 60})])
    assert row.bytes.value == pytest.approx(500)
    assert only([full(), *curve({1.0: 90, 0.5: 85})]).status == "not bracketed"


def test_never_extrapolated():
    row = only([full(), *curve({1.0: 90, 0.5: 89, 0.3: 88})])
    assert row.status == "not bracketed" and row.bytes.value == 300 and row.bytes.low == -math.inf
    assert row.budget.value == 0.3 and row.reached == 1.0
    lost = only([full(), *curve({0.5: 70, 0.3: 60})])
    assert lost.status == "not reached" and lost.bytes is lost.share is lost.budget is None and lost.reached < 0.05
    alone = only([full(), *curve({0.5: 89})])
    assert alone.status == "not bracketed" and alone.note == "one measured point"


def test_a_curve_that_dips_counts_from_above_the_dip():
    row = only([full(), *curve({1.0: 90, 0.5: 80, 0.3: 88, 0.1: 50})])
    assert row.bytes.value == pytest.approx(500 + 500 * 0.5) and "h2o:0.3 is within" in row.note
    last = only([full(), *curve({1.0: 80, 0.5: 90})])
    assert last.status == "not reached" and "h2o:0.5 is within" in last.note


def test_axes_and_ties():
    points = {1.0: 90, 0.5: 88, 0.1: 40}
    reader = [cell("quest", budget, "x", {"acc": share(hits)}, device=1060.0, total=1060.0, read=1000 * budget)
              for budget, hits in points.items()]  # fmt: skip
    held, read = (only([full(), *reader], by=axis) for axis in ("device", "read"))
    assert held.bytes.value == 1060 and held.share.value == pytest.approx(1.06)
    assert read.bytes.value == pytest.approx(100 + 400 * 45 / 48) and read.budget == held.budget


def test_tokens_and_budgets_that_do_not_compare():
    tokens = [cell("h2o", b, "x", {"acc": share(h)}, device=float(x))
              for b, h, x in ((64, 50, 64), (256, 89, 256), (1.0, 90, 1000))]  # fmt: skip
    row = only([full(), *tokens])
    assert row.status == "reached" and row.bytes.value == pytest.approx(64 + 192 * 35 / 39) and row.budget is None
    mixed = [cell("h2o", b, "x", {"acc": share(h)}, device=float(x)) for b, h, x in ((64, 50, 64), (0.3, 89, 300))]
    row = only([full(), *mixed])
    assert row.bytes.value == pytest.approx(64 + 236 * 35 / 39) and row.budget is None
    assert only([full(), cell("int8", None, "x", {"acc": share(90)}, device=280.0)]).bytes.value == 280


def test_values_are_compared_in_their_own_unit_and_direction():
    def kl(family, budget, value, device):
        rows = {"kl": [value * 0.5, value * 1.5] * 20, "top1": [1 - value / 10] * 40}
        return cell(family, budget, "fidelity", rows, metrics=[KL, TOP1], device=device)

    records = [kl("full", None, 0.0, 1000.0), kl("h2o", 1.0, 0.0, 1000.0), kl("h2o", 0.5, 0.2, 500.0),
               kl("h2o", 0.1, 1.0, 100.0)]  # fmt: skip
    row = only(records, metric="fidelity.kl", within=0.1)
    assert row.unit == "nats" and row.bytes.value == pytest.approx(750)
    assert only(records, metric="fidelity", within=5.0).metric == "top1"
    row = only(records, metric="fidelity.top1", within=5.0)  # 10 points at 100 bytes, 2 at 500
    assert row.unit == "points" and row.bytes.value == pytest.approx(500 - 400 * 3 / 8)
    assert match(records, "all").rows[0].metric == "top1"
    without = [
        record.model_copy(update={"task": record.task.model_copy(update={"metrics": [KL]})}) for record in records
    ]
    with pytest.raises(UserError, match=r"no metric in percentage points.*fidelity\.kl"):
        match(without, "all")


def test_better_than_full_is_within():
    assert only([full(50), *curve({0.5: 80})]).status == "not bracketed"


def test_the_interval_is_that_of_the_paired_samples():
    sharp = only([full(), *curve({1.0: 90, 0.5: 88, 0.3: 78, 0.1: 40})])
    random = np.random.default_rng(4)
    shuffled = [full(), *curve({1.0: 90, 0.5: 88, 0.3: 78, 0.1: 40})]
    for i, record in enumerate(shuffled[1:], 1):
        mixed = random.permutation([sample.metrics["acc"] for sample in record.samples])
        shuffled[i] = cell("h2o", record.budget, "x", {"acc": mixed}, device=1000.0 * record.budget)
    loose = only(shuffled)
    assert loose.bytes.value == pytest.approx(sharp.bytes.value)
    assert loose.bytes.high - loose.bytes.low > 1.5 * (sharp.bytes.high - sharp.bytes.low)
    assert loose.reached < 1.0 == sharp.reached
    assert only(shuffled) == loose


def test_the_interval_covers_the_true_point():
    random, inside = np.random.default_rng(8), 0
    chances = {1.0: 0.9, 0.5: 0.88, 0.3: 0.78, 0.1: 0.4}  # 0.85 at 440 bytes
    for _ in range(60):
        luck = random.random(200)
        records = [cell("full", None, "x", {"acc": luck < 0.9}, device=1000.0)]
        records += [cell("h2o", b, "x", {"acc": luck < p}, device=1000.0 * b) for b, p in chances.items()]
        span = only(records).bytes
        inside += span.low <= 440 <= span.high
    assert inside / 60 >= 0.88


def test_only_common_samples_count():
    points = curve({1.0: 90, 0.3: 60})
    short = points[0].model_copy(update={"samples": points[0].samples[:50]})
    assert only([full(), short, points[1]]).n == 50


def test_all_tasks_and_all_at_once():
    records = [full(), *curve({1.0: 90, 0.5: 88, 0.3: 78, 0.1: 40}), full(task="y"),
               *curve({1.0: 90, 0.5: 89, 0.3: 86, 0.1: 76}, task="y")]  # fmt: skip
    table = match(records, "all")
    assert [row.task for row in table.rows] == ["x", "y", "all at once"]
    once = table.rows[-1]
    assert once.binding == "x" and once.share.value == pytest.approx(0.44) and once.budget.value == pytest.approx(0.44)
    assert once.bytes is None and once.n == 100 and once.share.high >= table.rows[0].share.high
    assert table.rows[1].share.value == pytest.approx(0.1 + 0.2 * 9 / 10)


def test_all_at_once_where_a_task_fails_or_was_not_asked():
    lost = [full(), *curve({1.0: 90, 0.5: 89}), full(task="y"), *curve({1.0: 50, 0.5: 40}, task="y")]
    once = match(lost, "all").rows[-1]
    assert once.status == "not reached" and once.binding == "y" and once.share is None
    part = [full(), *curve({1.0: 90, 0.5: 89}), full(task="y"), *curve({1.0: 90}, task="y", family="quest")]
    rows = {(row.task, row.family): row for row in match(part, "all").rows}
    assert rows["y", "h2o"].status == rows["all at once", "h2o"].status == "not measured"
    assert rows["all at once", "quest"].note == "not measured on x"
    near = [full(), *curve({1.0: 90, 0.5: 89}), full(task="y"), *curve({1.0: 90, 0.3: 89}, task="y")]
    once = match(near, "all").rows[-1]
    assert once.status == "not bracketed" and once.share.value == once.budget.value == 0.5 and once.binding == ""


def test_models_and_ways_of_asking_are_kept_apart():
    other = full().model.model_copy(update={"stored": "bfloat16"})
    ways = [part for way in ("after", "before") for part in
            (full(parameters={"question": way}), *curve({1.0: 90, 0.1: 40}, parameters={"question": way}))]  # fmt: skip
    table = match([*ways, full(model=other), *curve({1.0: 90, 0.1: 40}, model=other)], "x")
    assert [row.task for row in table.rows] == ["x (question=after)", "x (question=before)", "x"]
    assert [row.model.split(", ")[1] for row in table.rows] == ["4-bit weights", "4-bit weights", "bfloat16"]
    assert len(match(ways, "x (question=before)").rows) == 1


def test_the_newer_of_two_records_counts():
    old = curve({0.5: 10})[0]
    new = old.environment.model_copy(update={"time": "2026-06-01T12:00:00Z"})
    points = [*curve({1.0: 90}), *curve({0.5: 89}, environment=new), old]
    assert only([full(), *points]).status == "not bracketed"


def test_bad_input():
    records = [full(), *curve({1.0: 90})]
    for how, said in (
        ({"metric": "xx"}, "did you mean 'x'"), ({"metric": "x.bcc"}, "x.acc"), ({"within": -1.0}, "0 or more"),
        ({"within": math.nan}, "0 or more"), ({"by": "devise"}, "did you mean 'device'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            match(records, **{"metric": "x", **how})
    with pytest.raises(UserError, match="no finished cell of full"):
        match(records[1:], "x")
    with pytest.raises(UserError, match="kvatlas quality"):
        match([], "x")


def test_failed_cells_and_cells_without_a_footprint():
    bare = cell("quest", 0.5, "x", {"acc": share(90)}, device=None)
    rows = {row.family: row for row in match([full(), *curve({1.0: 90}), bare, failed(task="piqa")], "x").rows}
    assert rows["quest"].status == "not measured" and rows["h2o"].status == "not bracketed"


losses = st.lists(st.floats(0, 60), min_size=1, max_size=6)


@given(losses, st.floats(0, 30))
def test_all_points_above_a_crossing_are_within_and_the_line_meets_the_bound(loss, within):
    place = crossings(np.array([loss]), within)[0]
    good = [one <= within + 1e-9 for one in loss]
    if place == -math.inf:
        assert all(good)
    elif place == math.inf:
        assert not good[-1]
    else:
        assert all(good[math.ceil(place - 1e-12) :]) and not good[math.ceil(place - 1e-12) - 1]
        assert np.interp(place, range(len(loss)), loss) == pytest.approx(within, abs=1e-6)


def test_infinite_losses_take_the_measured_point():
    assert crossings(np.array([[math.inf, 1.0]]), 5.0)[0] == 1.0
    assert crossings(np.array([[1.0, math.nan]]), 5.0)[0] == math.inf


# Against full


def test_against_full_is_mcnemar_and_holm():
    task = batteries([full(), *curve({1.0: 90, 0.5: 80, 0.1: 84})])[0].tasks[0]
    found = against(task, ACC)
    assert found["h2o:0.5"].p == mcnemar(10, 0) and found["h2o:0.5"].adjusted == pytest.approx(3 * mcnemar(10, 0))
    assert found["h2o:0.1"].adjusted == pytest.approx(2 * mcnemar(6, 0)) and not found["h2o:0.1"].differs
    assert found["h2o:0.5"].negatives.lost == 10 and found["h2o:1.0"].p == 1.0 and found["h2o:0.5"].differs
    assert against(batteries(curve({1.0: 90}))[0].tasks[0], ACC) == {}


def test_against_full_pairs_by_name():
    one, two = full(), curve({0.5: 80})[0]
    turned = two.model_copy(update={"samples": two.samples[::-1]})
    assert against(batteries([one, turned])[0].tasks[0], ACC)["h2o:0.5"].negatives.lost == 10


def test_a_whole_battery_in_seconds():
    table = match(battery(100), "all")
    assert len(table.rows) == 4 * 7 and not table.notes
    once = {row.family: row for row in table.rows if row.task == "all at once"}
    assert once["infinigen"].budget.value < once["h2o"].budget.value
    assert RECALLED.name in {row.metric for row in table.rows}
