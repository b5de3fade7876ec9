"""Intervals and tests: by hand, by counting all cases, by properties."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quality_records import ACC, KL, RECALLED, battery, cell

from kvatlas.quality.bins import binned
from kvatlas.quality.statistics import (
    Negatives,
    bootstrap_mean,
    breakdown,
    figures,
    holm,
    labels,
    mcnemar,
    mean_figure,
    newcombe,
    paired_shift,
    resampled_means,
    resamples_for,
    sign_flips,
)

counts = st.integers(0, 60)


# McNemar


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (8, 2, 2 * (1 + 10 + 45) / 1024), (3, 3, 1.0)],
)
def test_mcnemar_by_hand(lost, won, p):
    assert mcnemar(lost, won) == pytest.approx(p, rel=1e-15)


@given(counts, counts)
def test_mcnemar_counts_all_outcomes_as_far_from_even(lost, won):
    n = lost + won
    ways = sum(math.comb(n, i) for i in range(n + 1) if abs(2 * i - n) >= abs(lost - won))
    assert mcnemar(lost, won) == mcnemar(won, lost) == pytest.approx(ways / 2**n, rel=1e-12)


def test_mcnemar_of_many_samples_neither_overflows_nor_vanishes():
    assert mcnemar(20_000, 20_000) == 1.0
    assert 0 < mcnemar(0, 1000) < 1e-300
    with pytest.raises(ValueError, match="negative"):
        mcnemar(-1, 3)


# Differences of paired proportions


def test_newcombe_by_hand():
    # 32/50 - 22/50; Wilson: 0.5014 to 0.7586 and 0.3116 to 0.5769; phi = (320 - 24 - 25) / sqrt(32 * 18 * 22 * 28)
    low, high = newcombe(20, 12, 2, 16)
    phi = 271 / math.sqrt(32 * 18 * 22 * 28)
    down = math.sqrt(0.138595**2 - 2 * phi * 0.138595 * 0.136948 + 0.136948**2)
    up = math.sqrt(0.118623**2 - 2 * phi * 0.118623 * 0.128385 + 0.128385**2)
    assert (low, high) == pytest.approx((0.2 - down, 0.2 + up), abs=2e-3)
    assert (low, high) == pytest.approx((0.0562, 0.3292), abs=2e-3)  # as Newcombe's own paper has it


@given(counts, counts, counts, counts)
def test_newcombe_holds_the_difference_and_turns_with_it(both, first, second, neither):
    n = both + first + second + neither
    if n == 0:
        return
    low, high = newcombe(both, first, second, neither)
    assert -1 <= low <= (first - second) / n <= high <= 1
    other = newcombe(both, second, first, neither)
    assert other == pytest.approx((-high, -low), abs=1e-12)


def test_newcombe_covers_about_95_percent():
    n, chances = 30, (0.5, 0.25, 0.1, 0.15)
    true, covered = chances[1] - chances[2], 0.0
    for a, b, c in itertools.product(range(n + 1), repeat=3):
        if (d := n - a - b - c) < 0:
            continue
        weight = math.factorial(n) / math.prod(map(math.factorial, (a, b, c, d)))
        low, high = newcombe(a, b, c, d)
        covered += weight * math.prod(p**k for p, k in zip(chances, (a, b, c, d))) * (low <= true <= high)
    assert 0.94 < covered < 0.98


def test_negatives():
    found = Negatives.of([1, 0, 0, 1, 0], [1, 1, 1, 0, 0])
    assert (found.both, found.lost, found.won, found.neither, found.n) == (1, 2, 1, 1, 5)
    assert found.difference().value == pytest.approx(-0.2)
    assert found.p() == mcnemar(2, 1)
    with pytest.raises(ValueError, match="paired"):
        Negatives.of([1], [1, 0])
    with pytest.raises(ValueError, match="0 or 1"):
        Negatives.of([0.5], [1])


# The bootstrap


def test_bootstrap_is_near_the_normal_interval_where_that_is_right():
    values = np.random.default_rng(3).normal(5, 2, 400)
    half = 1.96 * values.std(ddof=1) / 20
    for method in ("bca", "percentile"):
        low, high = bootstrap_mean(values, method=method)
        assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


def test_bca_leans_towards_the_long_tail():
    values = np.random.default_rng(5).exponential(1.0, 40)
    plain, corrected = bootstrap_mean(values, method="percentile"), bootstrap_mean(values)
    assert corrected[0] > plain[0] and corrected[1] > plain[1]


def test_bca_is_efrons_with_the_jackknifes_acceleration():
    values = np.random.default_rng(5).exponential(1.0, 25) ** 2
    means, normal = np.sort(resampled_means(values)), NormalDist()
    left_out = np.array([np.delete(values, i).mean() for i in range(25)])
    off = left_out.mean() - left_out
    skew = (off**3).sum() / (6 * (off**2).sum() ** 1.5)
    bias = normal.inv_cdf((means < values.mean()).mean())
    levels = [normal.cdf(bias + (bias + z) / (1 - skew * (bias + z))) for z in (-1.959964, 1.959964)]
    assert bootstrap_mean(values) == pytest.approx(tuple(np.quantile(means, levels)), rel=1e-6)


def test_bca_covers_a_skewed_mean():
    random = np.random.default_rng(11)
    inside = 0
    for _ in range(300):
        low, high = bootstrap_mean(random.exponential(1.0, 50), resamples=800)
        inside += low <= 1.0 <= high
    assert 0.9 <= inside / 300 <= 0.98


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_bootstrap_holds_its_mean_and_is_repeatable(values):
    low, high = bootstrap_mean(values, resamples=200)
    assert min(values) - 1e-6 <= low <= np.mean(values) <= high <= max(values) + 1e-6
    assert (low, high) == bootstrap_mean(values, resamples=200)


def test_bootstrap_depends_on_its_seed_and_on_nothing_else(monkeypatch):
    values = np.arange(50.0)
    assert bootstrap_mean(values, seed=1) != bootstrap_mean(values, seed=2)
    whole = resampled_means(np.stack([values, values**2], 1), resamples=500)
    assert np.array_equal(whole[:, 0], resampled_means(values, resamples=500))
    assert len(whole) == 500 and resamples_for(100) == 10_000 and resamples_for(10**6) == 2_000


def test_bootstrap_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="nothing"):
        bootstrap_mean([])
    with pytest.raises(ValueError, match="finite"):
        bootstrap_mean([1.0, math.inf])
    assert bootstrap_mean([2.0, 2.0, 2.0]) == (2.0, 2.0)


def test_paired_shift_sees_what_single_intervals_do_not():
    base = np.random.default_rng(0).normal(0, 10, 60)
    better = base + np.random.default_rng(1).normal(1.0, 0.5, 60)
    shift = paired_shift(better, base, "nats")
    assert shift.p < 0.001 and 0.8 < shift.difference.low < shift.difference.high < 1.2
    assert shift.difference.interval == "95% bootstrap" and shift.difference.n == 60
    assert paired_shift(base, base, "nats").p == 1.0
    even = np.array([1.0, -1.0] * 30)
    assert paired_shift(even, np.zeros(60), "nats").p > 0.9
    with pytest.raises(ValueError, match="paired"):
        paired_shift([1.0], [1.0, 2.0], "nats")


def test_paired_shift_is_rarely_wrong_where_there_is_no_difference():
    random = np.random.default_rng(17)
    false = sum(paired_shift(random.normal(0, 1, 40), np.zeros(40), "", resamples=500).p < 0.05 for _ in range(300))
    assert 4 <= false <= 30


def test_sign_flips_by_hand():
    assert sign_flips([1.0, 2.0]) == 0.5  # two samples can never tell
    assert sign_flips([1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == pytest.approx(2 / 64)
    assert sign_flips([3.0, -1.0, 1.0]) == pytest.approx(6 / 8)
    many = np.random.default_rng(3).normal(0.05, 1, 14)
    exact = np.mean(
        [abs((many * [1 - 2 * (i >> k & 1) for k in range(14)]).sum()) >= abs(many.sum()) for i in range(2**14)]
    )
    assert sign_flips(many, resamples=20000) == pytest.approx(exact, abs=0.02)


# Holm


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.2]) == [0.2] and holm([0.6, 0.7]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_never_lowers_a_p_and_keeps_the_order(p):
    adjusted = holm(p)
    assert all(a >= b and a <= 1 for a, b in zip(adjusted, p))
    order = sorted(range(len(p)), key=p.__getitem__)
    assert [adjusted[i] for i in order] == sorted(adjusted)
    assert min(adjusted) == pytest.approx(min(1, len(p) * min(p)))


# Figures and breakdowns


def test_figures_of_samples():
    record = cell("h2o", 0.3, "x", {"recalled": [1, 1, 0, 1], "kl": [0.1, 0.2, 0.3, 0.4]}, metrics=[RECALLED, KL])
    found = figures([RECALLED, KL, ACC], record.samples)
    assert set(found) == {"recalled", "kl"}
    assert found["recalled"].value == 0.75 and found["recalled"].interval == "95% Wilson" and found["recalled"].n == 4
    assert found["kl"].value == pytest.approx(0.25) and found["kl"].interval == "95% bootstrap"
    assert found["kl"].low < 0.25 < found["kl"].high and found["kl"].unit == "nats"
    assert figures([RECALLED], []) == {}


def test_figures_without_an_interval():
    assert mean_figure([3.0], "nats").interval is None
    assert mean_figure([3.0, math.inf], "nats").value == math.inf
    assert math.isnan(mean_figure([-math.inf, math.inf], "nats").value)


def test_breakdown_by_known_labels():
    labels_ = [{"tokens": t, "turns": u} for t, u in ((1024, 1), (1025, 2), (2048, 3), (4097, 7), (8192, 12))]
    record = cell("h2o", 0.3, "x", {"recalled": [1, 1, 0, 0, 1]}, metrics=[RECALLED], labels=labels_)
    lengths = breakdown(record, "tokens")
    assert {name: one["recalled"].n for name, one in lengths.items()} == {"up to 1K": 1, "1-2K": 2, "4-8K": 2}
    assert lengths["1-2K"]["recalled"].value == 0.5
    turns = breakdown(record, "turns")
    assert {name: one["recalled"].n for name, one in turns.items()} == {"1": 1, "2-3": 2, "7-12": 2}
    assert labels(record) == ["tokens", "turns"] and breakdown(record, "kind") == {}


def test_bins_of_other_labels():
    def names(label, values):
        record = cell("h2o", 0.3, "x", {"acc": [1] * len(values)}, labels=[{label: value} for value in values])
        return {name: len(samples) for name, samples in binned(record.samples, label).items()}

    assert names("kind", ["b", "a", "b"]) == {"a": 1, "b": 2}
    assert names("depth", [0.0, 0.5, 1.0]) == {"0 %": 1, "50 %": 1, "100 %": 1}
    assert names("depth", ["100%", "5%", "20%"]) == {"5 %": 1, "20 %": 1, "100 %": 1}
    assert names("depth", [f"{i}%" for i in range(100)])["0-25 %"] == 26
    assert list(names("tokens", ["8-16K", "1-2K", "up to 1K", "16-32K"])) == ["up to 1K", "1-2K", "8-16K", "16-32K"]
    assert names("depth", [i / 99 for i in range(100)]) == {
        "0-25 %": 25, "25-50 %": 25, "50-75 %": 25, "75-100 %": 25}  # fmt: skip
    assert names("place", list(range(100))) == {
        "0 to 24": 25, "above 24 to 49": 25, "above 49 to 74": 25, "above 74 to 99": 25}  # fmt: skip
    assert names("seen", [True, False, True]) == {"False": 1, "True": 2}
    many = names("word", [f"w{i:02}" for i in range(30)] + ["w29"] * 5)
    assert len(many) == 24 and many["w29"] == 6 and many["others"] == 7 and list(many)[-1] == "others"


@given(st.lists(st.one_of(st.integers(-50, 50), st.floats(-5, 5)), min_size=1, max_size=60))
def test_every_sample_is_in_one_bin(values):
    record = cell("h2o", 0.3, "x", {"acc": [1] * len(values)}, labels=[{"at": value} for value in values])
    groups = binned(record.samples, "at")
    assert sorted(s.name for group in groups.values() for s in group) == sorted(s.name for s in record.samples)
    tops = [max(float(s.labels["at"]) for s in group) for group in groups.values()]
    assert tops == sorted(tops)


def test_labels_that_say_something():
    rows = [{"kind": "ab"[i % 2], "value": f"v{i % 30}", "same": 1, "id": f"x{i}", "at": i} for i in range(60)]
    assert labels(cell("h2o", 0.3, "x", {"acc": [1] * 60}, labels=rows)) == ["kind", "at"]


def test_bins_are_the_same_for_every_strategy():
    records = [record for record in battery(40) if record.task.name == "retention"]
    assert len({tuple(breakdown(record, "depth")) for record in records}) == 1
