"""The report: what it says, that it is inert, that it needs no network, that a browser draws it without a complaint."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess

import pytest
from report_records import POINTS, failed, record, study

from kvatlas.errors import UserError
from kvatlas.measure.record import Figure, Strategy
from kvatlas.report import charts, result_text, write_report
from kvatlas.report.cells import cautions, cells, facts, tones
from kvatlas.report.findings import findings, headline
from kvatlas.report.page import render
from kvatlas.report.show import number, size

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
DEED = "document.documentElement.dataset.pwned=1"
PWN = f"<script>{DEED}</script><img src=x onerror={DEED}>"


@pytest.fixture(scope="module")
def page() -> str:
    return render([*study(), failed()])


# What it says


def test_headline_is_computed():
    cell = cells(study())[0]
    assert headline(cell).startswith("h2o:0.3 was among the fastest, at 1.58 × full’s speed, with 31 % of its KV bytes")
    assert "recalled 8 of 24 facts (reference 21 of 24)" in headline(cell)
    slow = [record("full"), record("infinigen:0.3")]
    assert headline(cells(slow)[0]).startswith("No strategy was clearly faster than full here; infinigen:0.3 stayed")
    said = " ".join(findings(cell))
    assert "Same as full (KL 0): paged. Nearest to full of the others: oracle:0.1" in said
    assert "clearly below: streaming:0.3, h2o:0.3 and random:0.3" in said


def test_headline_without_a_reference_or_without_success():
    assert "reference is not among" in headline(cells([record("paged"), record("h2o:0.3")])[0])
    assert "nothing to compare" in headline(cells([record("paged")])[0])
    assert headline(cells([failed()])[0]) == "No strategy finished"


def test_too_few_facts_are_not_called_a_loss():
    near = record("h2o:0.3", (0.3, 1.0, 20.0, 2.3, 0.0, False, 0.01, 500, 19, 18.0))
    assert "too few to tell apart" in headline(cells([record("full"), near])[0])
    assert "no strategy was clearly below" in " ".join(findings(cells([record("full"), near])[0]))


def test_records_of_different_settings_are_not_mixed():
    other = [record(spec, asked={"batch": 8}) for spec in ("full", "paged")]
    groups = cells([*study(), *other])
    assert [len(cell.records) for cell in groups] == [len(POINTS), 2]
    colours = tones(groups)
    assert colours["full"] == 0 and len(set(colours.values())) == len(POINTS)
    assert "comparison 2 of 2" in render([*study(), *other])


def test_cautions_and_facts():
    here = record("full")
    away = record("paged", environment=here.environment.model_copy(update={"cpu": "AMD EPYC"}))
    cell = cells([here, away])[0]
    assert any("different machines" in line for line in cautions(cell))
    assert any("logical" in line for line in cautions(cell))
    hardware = dict(facts(cell))["Hardware"]
    assert len(hardware) == 2 and "(paged)" in hardware[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1210.4, "1,210"), (97.56, "97.6"), (1.307, "1.31"), (0.0123, "0.012"), (3e-5, "3e-05"), (9e999, "∞")],
)
def test_numbers(value, text):
    assert number(value) == text


def test_sizes():
    assert size(25e9) == "25.0 GB" and size(0) == "0 bytes"


# The terminal


def test_result_block_fits_100_columns_and_has_everything():
    text = result_text([*study(), failed()], width=100)
    assert max(map(len, text.splitlines())) <= 100
    for word in (*POINTS, "TTFT", "tok/s", "MB", "ms", "21/24", "n = 3 repeats", "24 facts", "memory: needed 31 GB"):
        assert word in text
    assert "…" not in text and "..." not in text


def test_result_block_marks_what_was_modelled_and_survives_missing_sections():
    bare = record("paged", quality=None, realised=None, transfers=None, memory=None)
    moved = record("infinigen:0.3")
    modelled = moved.transfers.model_copy(update={"blocked": Figure.exact(0.02, "s", kind="modelled")})
    text = result_text([record("full"), bare, moved.model_copy(update={"transfers": modelled})])
    assert "~20.0" in text and "modelled, not measured" in text and "–" in text
    assert "No records" in result_text([])
    assert "out of memory" in result_text([failed()])


def test_terminal_escapes_are_inert():
    spec = Strategy(asked="[bold]\x1b[31mx", normalised="x", keep="", read="", place="", encode="")
    evil = record("full", strategy=spec)
    text = result_text([evil, failed(error="\x1b]0;title\x07boom")])
    assert "\x1b" not in text and "\x07" not in text and "[bold]" in text


# The charts


def test_every_choice_of_axes_is_a_valid_chart():
    import vl_convert

    cell = cells(study())[0]
    for axes, count in ((charts.QUALITY, 12), (charts.SPEED, 6)):
        panel = charts.scatter(cell, tones([cell]), axes)
        assert len(panel["specs"]) == count
        for spec in list(panel["specs"].values())[::5]:
            spec = json.loads(json.dumps(spec).replace('"container"', "700"))
            assert "h2o:0.3" in vl_convert.vegalite_to_svg(spec)


def test_points_without_a_figure_are_named_not_drawn():
    endless = record("random:0.3").quality.model_copy(update={"perplexity": Figure.exact(math.inf, "ppl")})
    cell = cells([record("full"), record("paged", quality=None), record("random:0.3", quality=endless)])[0]
    panel = charts.scatter(cell, tones([cell]), charts.QUALITY)
    assert "Not drawn, for want of a figure: paged, random:0.3." in panel["notes"]["device|perplexity"]
    assert [row["name"] for row in panel["specs"]["device|kl"]["data"]["values"]] == ["full", "random:0.3"]


def test_colour_and_shape_tell_fifty_strategies_apart():
    points = [record(f"quest:{n}", POINTS["h2o:0.3"]) for n in range(1, 51)]
    cell = cells([record("full"), *points])[0]
    rows = charts.scatter(cell, tones([cell]), charts.SPEED)["specs"]["device|tpot"]["data"]["values"]
    assert len({(row["ink"], row["shape"]) for row in rows}) == 51


def test_no_empty_panels():
    bare = [record(spec, quality=None) for spec in ("full", "paged")]
    text = render(bare)
    assert "no record has a quality figure" in text and "No strategy finished" in render([failed()])
    assert "no strategy finished" in render([failed()])


# The page


def test_page_needs_no_network(page):
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|img|link|iframe)[^>]+(src|href)=[\"']?(https?:)?//", page)
    assert "@import" not in page and "url(" not in page.split("</style>")[0]


def test_page_says_what_was_measured_and_how(page):
    for word in (
        *("What was measured, and how", "pydoc_data.topics", "ab" * 32, "GGUF Q8_0", "torch 2.13.0", "Intel Xeon"),
        *("n = 24, 95% Wilson", "cache is ready for the next step", "Did not finish", "needed 31 GB", "Copies between"),
    ):
        assert word in page


def test_strings_of_the_user_are_inert_in_the_source():
    text = render(_evil())
    assert PWN not in text and "</td><b>" not in text and text.count("</script>") == 3


def test_no_place_for_the_report(tmp_path):
    with pytest.raises(UserError, match="cannot write the report"):
        write_report(study(), tmp_path / "nowhere" / "report.html")
    with pytest.raises(UserError, match="no records"):
        write_report([], tmp_path / "report.html")


# The browser


@browser
def test_browser_draws_all_charts_without_a_complaint(tmp_path):
    write_report([*study(), failed()], tmp_path / "report.html")
    dom, complaints = _open(tmp_path / "report.html")
    assert not complaints
    assert 'data-drawn="3"' in dom and len(re.findall(r"<svg[^>]*marks", dom)) == 3
    for spec in POINTS:
        assert dom.count(f">{spec}</text>") == 3


@browser
def test_reader_chooses_axes_and_sorts(page, tmp_path):
    test = """<script>setTimeout(() => {
      const pick = (panel, axis, value) => { const one = document.querySelector(`[data-chart=${panel}] [data-axis=${axis}]`);
        one.value = value; one.dispatchEvent(new Event("change")); };
      pick("quality", "x", "read"); pick("quality", "y", "recall"); pick("speed", "x", "peak_decode"); pick("speed", "y", "tpot");
      const heads = [...document.querySelectorAll(".figures button")], tpot = heads.find((one) => one.textContent.startsWith("TPOT"));
      const order = () => [...document.querySelectorAll(".figures")].map((one) => [...one.tBodies[0].rows].map((row) => row.cells[0].textContent.trim()).join());
      tpot.click(); const up = order(); tpot.click(); const down = order();
      document.documentElement.dataset.sorted = JSON.stringify([up, down]);
    }, 1500)</script>"""  # noqa: E501
    path = tmp_path / "report.html"
    before, after = re.sub(r"<meta http-equiv[^>]+>", "", page).rsplit("</body>", 1)
    path.write_text(f"{before}{test}</body>{after}")
    dom, complaints = _open(path)
    assert not complaints
    assert "KV bytes read a step (MB, log scale)</text>" in dom and ">Recall of told facts (%)</text>" in dom
    assert ">Process peak in decode (MB)</text>" in dom and ">Time per output token, median (ms)</text>" in dom
    up, down = json.loads(re.search(r'data-sorted="([^"]+)"', dom)[1].replace("&quot;", '"'))
    by_speed = ",".join(sorted(POINTS, key=lambda spec: POINTS[spec][2]))
    assert up == [by_speed] * 3 and down == [",".join(reversed(by_speed.split(",")))] * 3


@browser
def test_strings_of_the_user_are_inert_in_the_browser(tmp_path):
    path = tmp_path / "report.html"
    for guarded in (True, False):
        text = render(_evil())
        path.write_text(text if guarded else re.sub(r"<meta http-equiv[^>]+>", "", text))
        dom, complaints = _open(path)
        assert not complaints and "data-pwned" not in dom and "data-drawn" in dom


def _evil():
    spec = Strategy(asked=PWN, normalised=PWN + "n", keep="</td><b>", read="{{ 7 * 7 }}", place="<!--", encode="]]>")
    model = record().model.model_copy(update={"name": PWN, "weights": "</script>" + PWN, "source": "<!--<script>"})
    work = record().workload.model_copy(update={"text": PWN})
    evil = record("full", strategy=spec, model=model, workload=work)
    return [record("full"), evil, failed("h2o:0.1", error=PWN)]


def _open(path) -> tuple[str, list[str]]:
    """The page's DOM after its scripts ran, and what the console complained of."""
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom",
         "--virtual-time-budget=8000", "--window-size=1200,2000", f"--user-data-dir={path.parent / 'profile'}",
         path.as_uri()],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
