"""The battery's report: what the terminal and the page say, that the page is inert and drawn without a complaint."""

from __future__ import annotations

import json
import re

import pytest
from quality_records import ACC, BUDGETS, KL, LOSES, TASKS, battery, cell, failed
from test_report import PWN, _open, browser

from kvatlas.advise.match import match
from kvatlas.errors import UserError
from kvatlas.report.quality import match_text, quality_text
from kvatlas.report.quality_page import findings, render, write_quality_page


@pytest.fixture(scope="module")
def records():
    return [*battery(60), failed("kvquant")]


@pytest.fixture(scope="module")
def page(records) -> str:
    return render(records)


def small(hits: dict[float, int], n: int = 40, **more):
    """full right in 36 of 40, h2o in so many."""
    points = [cell("h2o", budget, "x", {"acc": [1] * right + [0] * (n - right)}, device=1e6 * budget, **more)
              for budget, right in hits.items()]  # fmt: skip
    return [cell("full", None, "x", {"acc": [1] * 36 + [0] * 4}, device=1e6, **more), *points]


# The terminal


def test_terminal_fits_80_columns_and_has_everything(records):
    text = quality_text(records)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for word in (*TASKS, *LOSES, *(f"{budget:g}" for budget in BUDGETS), "n = 60", "Wilson", "bootstrap", "McNemar",
                 "✗ kvquant:0.1 failed: the prompt does not fit", "device", "total", "read", "shots 5",
                 "SmolLM2-135M-Instruct, 4-bit weights, float32"):  # fmt: skip
        assert word in text, word


def test_terminal_says_value_interval_and_mark():
    text = quality_text(small({0.5: 35, 0.1: 20}))
    assert "full: 90 % (77–96), n = 40" in text
    line, below = re.search(r"h2o +(88) +(50\*)\n +(74–95) +(35–65)", text), "36 wrong"
    assert line and below in text and "Most lost: h2o:0.1 gets 16 of the 36" in text
    assert "Holm over 2," in " ".join(text.split())


def test_terminal_without_a_reference_marks_nothing():
    text = quality_text(small({0.5: 35, 0.1: 20})[1:])
    assert "full: not measured" in text and "*" not in text


def test_terminal_has_many_budgets_in_two_tables_and_tokens_and_no_budget():
    many = small({i / 10: 36 for i in range(1, 10)})
    text = quality_text([*many, cell("h2o", 64, "x", {"acc": [1] * 40}, device=6e4),
                         cell("int8", None, "x", {"acc": [1] * 40}, device=3e5)])  # fmt: skip
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("budget ") == 4 and "64 tokens" in text and "as it is" in text
    assert quality_text([]) == "No quality records to show.\n"


def test_match_text_says_what_was_reached_and_what_not():
    text = match_text(match(small({1.0: 36, 0.5: 30}), "x"))
    assert "within 5 points of full" in text and "833 kB" in text and "0.83" in text
    assert "n" in text and "Measured on SmolLM2-135M-Instruct, 4-bit weights, float32." in text
    assert "≤ 500 kB" in match_text(match(small({1.0: 36, 0.5: 36}), "x"))
    lost = match_text(match(small({1.0: 30, 0.5: 20}), "x"))
    assert "not reached" in lost
    whole = match_text(match(battery(40), "all"))
    assert "all at once" in whole and max(map(len, whole.splitlines())) <= 80 and "held back by" in whole


# The page


def test_page_has_every_figure_with_its_n(page):
    for word in (*TASKS, *LOSES, "4-bit weights", "n = 60", "not measured", "kvquant:0.1 failed", "Holm", "Newcombe"):
        assert word in page, word
    assert "http" not in re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.S).replace("http-equiv", "")
    assert page.count("</script>") == 4 - 1


def test_findings_say_the_need_or_that_there_is_none():
    def said(hits):
        records = small(hits)
        return findings([match(records, "all", 5.0, by) for by in ("device", "total", "read")])

    assert said({1.0: 36, 0.5: 30}) == [
        "h2o needs 83 % of full’s bytes on the device, 83 % in all tiers, 83 % of those read a step to stay within "
        "5 points of full on x."
    ]
    assert "at most 50 %" in said({1.0: 36, 0.5: 36})[0]
    assert said({1.0: 20}) == ["h2o stays within 5 points of full at no measured budget on x."]
    assert "nothing to compare" in findings([])[0]


def test_page_without_a_reference_or_a_success_is_still_a_page():
    assert "no task has a finished cell of full" in render(small({0.5: 30})[1:])
    assert "Did not finish" in render([failed()])
    infinite = [cell("full", None, "f", {"kl": [0.0, 0.0]}, metrics=[KL]),
                cell("h2o", 0.1, "f", {"kl": [float("inf"), 1.0]}, metrics=[KL])]  # fmt: skip
    assert "∞" in render(infinite)


def test_page_keeps_models_apart(records):
    other = records[0].model.model_copy(update={"name": "Other", "stored": "bfloat16"})
    text = render([*small({0.5: 30}), *small({0.5: 20}, model=other)])
    assert "model 2 of 2" in text and "Other, bfloat16, float32" in text


def test_no_place_for_the_page(tmp_path):
    with pytest.raises(UserError, match="cannot write the report"):
        write_quality_page(small({0.5: 30}), tmp_path / "nowhere" / "q.html")
    with pytest.raises(UserError, match="no quality records"):
        write_quality_page([], tmp_path / "q.html")


def _evil():
    points = small({0.5: 30, 0.1: 20})
    spec = points[1].strategy.model_copy(update={"asked": PWN, "keep": "</td><b>", "place": "<!--"})
    model = points[1].model.model_copy(update={"name": PWN, "stored": "</script>" + PWN})
    task = points[1].task.model_copy(update={"name": PWN, "parameters": {PWN: PWN}})
    evil = [point.model_copy(update={"model": model, "task": task}) for point in points]
    evil[1] = evil[1].model_copy(update={"family": PWN, "strategy": spec})
    return [*evil, evil[2].model_copy(update={"status": "failed", "error": PWN, "family": "late"})]


def test_strings_of_records_are_inert_in_the_source():
    text = render(_evil())
    assert PWN not in text and "</td><b>" not in text and text.count("</script>") == 3


@browser
def test_strings_of_records_are_inert_in_the_browser(tmp_path):
    path = tmp_path / "q.html"
    path.write_text(re.sub(r"<meta http-equiv[^>]+>", "", render(_evil())))
    dom, complaints = _open(path)
    assert not complaints and "data-pwned" not in dom and "data-drawn" in dom


@browser
def test_browser_draws_all_charts_and_follows_the_choices(page, tmp_path):
    test = """<script>setTimeout(() => {
      const pick = (one, value) => { one.value = value; one.dispatchEvent(new Event("change")); };
      for (const one of document.querySelectorAll("[data-chart=curves] [data-axis=x]")) pick(one, "budget");
      pick(document.querySelector("[data-chart=breakdowns] [data-axis=x]"), "kind");
      pick(document.querySelector("[data-switch]"), "read");
      document.documentElement.dataset.parts = JSON.stringify(
        [...document.querySelectorAll("[data-part]")].filter((one) => !one.hidden).map((one) => one.dataset.part));
    }, 2500)</script>"""
    path = tmp_path / "q.html"
    before, after = re.sub(r"<meta http-equiv[^>]+>", "", page).rsplit("</body>", 1)
    path.write_text(f"{before}{test}</body>{after}")
    dom, complaints = _open(path)
    assert not complaints
    charts = len(TASKS) + 2  # two tasks have labels
    assert f'data-drawn="{charts}"' in dom and len(re.findall(r"<svg[^>]*marks", dom)) == charts
    assert dom.count(">Budget (share of the tokens)</text>") == len(TASKS) and ">colour</tspan>" in dom
    assert json.loads(re.search(r'data-parts="([^"]+)"', dom)[1].replace("&quot;", '"')) == ["read"]


@browser
def test_page_is_drawn_under_its_own_policy(tmp_path):
    write_quality_page(small({0.5: 30, 0.1: 20}), tmp_path / "q.html")
    dom, complaints = _open(tmp_path / "q.html")
    assert not complaints and 'data-drawn="1"' in dom and ACC.name in dom
