"""The spec language: what it means, that it survives being written and read again, and every way to get it wrong."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import UserError
from kvatlas.strategy.answers import Encode, Keep, Read
from kvatlas.strategy.budget import format_budget, parse_budget, resolve
from kvatlas.strategy.keep.heavy import HeavyHitters
from kvatlas.strategy.keep.window import SinksAndWindow
from kvatlas.strategy.place.device import Device
from kvatlas.strategy.place.host import Host
from kvatlas.strategy.place.paged import Paged
from kvatlas.strategy.read.oracle import Oracle
from kvatlas.strategy.read.speculation import Speculated
from kvatlas.strategy.registry import Parameter, Preset, presets, register
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import PrefillMode

BUDGETS = st.one_of(
    st.floats(0.001, 0.999).map(repr), st.integers(1, 10**6).map(str), st.just("1.0")
)  # as written in a spec


TABLE = {
    *("full", "paged", "virtual", "host", "disk", "flexgen", "blockcache"),
    *("streaming", "h2o", "scissorhands", "snapkv", "alisa", "random", "recall"),
    *("quest", "infinigen", "pqcache", "infllm", "squeezed", "oracle"),
    *("int8", "int4", "kvquant", "raw"),
}
LOSSY = {
    "infinigen": "its alpha",
    "infllm": "its window",
    "squeezed": "its threshold",
    "flexgen": "its 4 bits",
    "int8": "8 bits",
    "int4": "4 bits",
    "kvquant": "4 bits",
}


def test_presets_are_the_ones_of_the_table() -> None:
    assert set(presets()) >= TABLE
    for name, preset in presets().items():
        strategy = parse(name)
        assert strategy.name == name and preset.summary
        assert set(strategy.answers()) == {"keep", "read", "place", "encode"}
        assert strategy.prefill == PrefillMode()
        assert strategy.lossless() == (name not in LOSSY), "without a budget all are lossless but these"


def test_a_spec_sets_the_fields_of_its_answers() -> None:
    full = parse("full")
    assert (full.keep, full.read, full.place, full.encode) == (Keep(), Read(), Device(), Encode())
    h2o = parse("h2o:0.3,sinks=2,normalise=true,gqa=max,variant=flexgen,prefill=chunked:64,evict=chunk")
    assert h2o.keep == HeavyHitters(budget=0.3, sinks=2, normalise=True, gqa="max", variant="flexgen")
    assert h2o.prefill == PrefillMode("chunked", 64, True)
    infinigen = parse("infinigen:0.2,alpha=inf,partial=0.25,pool=400,policy=lru,overlap=false,link=12.5")
    assert infinigen.read == Speculated(budget=0.2, alpha=float("inf"), partial=0.25)
    assert infinigen.place == Host(overlap=False, link=12.5)
    assert infinigen.keep.budget == 400 and infinigen.keep.policy == "lru"  # type: ignore[attr-defined]


def test_plus_combines_answers_to_different_questions() -> None:
    both = parse(" streaming:0.5,positions=true + oracle:0.2 ,gqa=sum + host:overlap=false ")
    assert both.keep == SinksAndWindow(budget=0.5, positions="true")
    assert both.read == Oracle(budget=0.2, gqa="sum")
    assert both.place == Host(overlap=False)
    assert both.name == "streaming:0.5,positions=true+oracle:0.2,gqa=sum+host:overlap=false"
    assert parse("oracle:0.1+paged:block=8").place == Paged(block=8)


def test_a_strategy_passes_through() -> None:
    strategy = parse("h2o:0.3")
    assert parse(strategy) is strategy


# ------------------------------------------------------------------- round trip


ONLY = {
    ("bits", "kvquant"): ["2", "3", "4"],
    ("bits", "pqcache"): ["1", "6", "8"],
    ("outliers", "kvquant"): ["0.01", "0.4"],
    ("kernel", "snapkv"): ["1", "5", "7"],
    ("dir", "disk"): ["."],
    ("direct", "disk"): ["auto", "true", "false"],
    ("direct", "flexgen"): ["auto", "true", "false"],
    ("dir", "flexgen"): ["."],
    ("context", "squeezed"): ["context.txt"],
}
TIED = ("h2o", "recall", "snapkv", "scissorhands", "flexgen", "infllm", "squeezed", "pqcache", "blockcache", "alisa")
"""Presets whose parameters bind each other, so that some combinations are errors."""


def value_of(name: str, parameter: Parameter, preset: str) -> st.SearchStrategy[str]:
    """Texts that a parameter takes."""
    if (name, preset) in ONLY:
        return st.sampled_from(ONLY[name, preset])
    kinds = [k for k in (get_args(parameter.type) or (parameter.type,)) if k is not type(None)]
    if get_origin(parameter.type) is Literal:
        return st.sampled_from([str(v) for v in get_args(parameter.type)])
    if parameter.field == "budget":
        return BUDGETS
    if kinds == [bool]:
        return st.sampled_from(["true", "false"])
    if kinds == [int]:
        return st.integers(1, 5000).map(str)
    assert kinds == [float], f"{name}: teach this test its type {parameter.type}"
    return st.floats(0.001, 1.0).map(repr)


@st.composite
def specs(draw: st.DrawFn) -> str:
    """Any one preset with any of its parameters, as a user may write them."""
    preset = draw(st.sampled_from(list(presets().values())))
    parameters = preset.parameters()
    items = [f"{k}={draw(value_of(k, parameters[k], preset.name))}" for k in sorted(parameters) if draw(st.booleans())]
    if preset.budgeted and draw(st.booleans()):
        items.insert(0, draw(BUDGETS))
    prefill = draw(st.sampled_from(["", "flash", "eager", "chunked:7", "chunked:512", "chunked-isolated:9"]))
    items += [f"prefill={prefill}"] if prefill else []
    items += ["evict=chunk"] if prefill.startswith("chunked:") and draw(st.booleans()) else []
    return preset.name + (":" + ",".join(items) if items else "")


def parsed(spec: str) -> Any:
    """The strategy, or None where a combination is (rightly) an error."""
    try:
        return parse(spec)
    except UserError:
        return None


@given(specs(), specs())
def test_what_is_written_reads_back(one: str, two: str) -> None:
    """A strategy's name is a spec of the same strategy; combined ones too."""
    for spec in (one, f"{one}+{two}"):
        strategy = parsed(spec)
        if strategy is not None:
            again = parse(strategy.name)
            assert again == strategy, spec
            assert again.name == strategy.name


@given(specs())
def test_most_specs_are_no_errors(spec: str) -> None:
    """The generator above must not test errors only."""
    if not spec.startswith(TIED):
        assert parse(spec).name.startswith(spec.split(":")[0])


@given(BUDGETS)
def test_budget_text_round_trip(text: str) -> None:
    assert parse_budget(format_budget(parse_budget(text))) == parse_budget(text)


# ----------------------------------------------------------------------- budget


@pytest.mark.parametrize(
    ("text", "length", "tokens"),
    [
        ("1.0", 100, None),
        ("1", 100, 1),
        ("2", 100, 2),
        ("256", 100, 256),
        ("0.3", 100, 30),
        ("0.3", 10, 3),  # not 2: 0.3 * 10 is 2.9999... in floats
        ("0.29", 100, 29),
        ("0.01", 5, 1),  # never nothing
        ("0.999", 1000, 999),
    ],
)
def test_budget_means_tokens(text: str, length: int, tokens: int | None) -> None:
    assert resolve(parse_budget(text), length) == tokens


@pytest.mark.parametrize("bad", ["0", "-1", "-0.3", "1.5", "0.0", "nan", "inf", "many", "2.0001", "1e-400", ""])
def test_bad_budgets(bad: str) -> None:
    with pytest.raises(UserError, match=r"budget|key=value"):
        parse(f"h2o:budget={bad}")


# ----------------------------------------------------------------------- errors

WRONG = [
    ("", "empty"),
    ("  ", "empty"),
    ("h2p:0.3", "did you mean 'h2o'"),
    ("streamin", "did you mean 'streaming'"),
    ("xyzzy", "choose from: .*full"),
    ("h2o+", "nothing stands on one side"),
    ("h2o:0.3,sink=4", "no parameter 'sink'.*did you mean 'sinks'"),
    ("h2o:0.3,window=4", "no parameter 'window'"),
    ("h2o:0.3,sinks", "not key=value"),
    ("h2o:0.3,sinks=", "not key=value"),
    ("h2o:0.3,0.4", "not key=value"),
    ("h2o:0.3,,", "not key=value"),
    ("h2o:0.3,sinks=4,sinks=5", "sinks.*twice"),
    ("h2o:0.3,budget=0.4", "budget.*twice"),
    ("h2o:0.3,prefill=eager,prefill=flash", "prefill.*twice"),
    ("h2o:0.3,sinks=2.5", "whole number"),
    ("h2o:0.3,sinks=-1", "sinks must be 0 or more"),
    ("h2o:0.3,normalise=yes", "true or false"),
    ("h2o:0.3,gqa=median", "mean or max or sum"),
    ("h2o:0.3,heavy=4", "either a budget or"),
    ("h2o:heavy=0", "heavy must be at least 1"),
    ("h2o:heavy=4,recent=-1", "recent must be at least 0"),
    ("h2o:recent=4", "needs heavy"),
    ("h2o:variant=flexgen,heavy=4,recent=4", "leave recent out"),
    ("streaming:0.3,sinks=-1", "sinks must be 0 or more"),
    ("streaming:0.3,positions=nowhere", "cache or true"),
    ("random:0.3,sinks=-1", "sinks must be 0 or more"),
    ("random:0.3,recent=-0.1", "recent must be"),
    ("random:0.3,recent=1.5", "recent must be"),
    ("random:0.3,recent=nan", "recent must be"),
    ("infinigen:0.3,partial=0", "partial must be above 0"),
    ("infinigen:0.3,partial=1.5", "at most 1"),
    ("infinigen:0.3,alpha=0", "alpha must be above 0"),
    ("infinigen:0.3,alpha=nan", "alpha must be above 0"),
    ("infinigen:0.3,pool=0", "budget 0 must be above 0"),
    ("infinigen:0.3,pool=1.5", "not whole"),
    ("infinigen:0.3,policy=mru", "counter or lru or fifo"),
    ("infinigen:0.3,link=0", "link must be above 0"),
    ("host:link=-3", "link must be above 0"),
    ("host:overlap=1", "true or false"),
    ("full:0.3", "takes no budget"),
    ("paged:0.3", "takes no budget"),
    ("paged:block=0", "block must be at least 1"),
    ("paged:block=many", "whole number"),
    ("h2o:0.3+streaming:0.3", "h2o and streaming both answer 'keep'"),
    ("oracle:0.3+infinigen:0.3", "oracle and infinigen both answer 'read'"),
    ("h2o:0.3+", "nothing stands on one side"),
    ("+", "nothing stands on one side"),
    ("infinigen:0.3,overlap=false+paged", "both answer 'place'"),
    ("h2o:0.3+infinigen:0.3,pool=0.5", "both answer 'keep'"),
    ("full+h2o:0.3,prefill=eager+oracle:0.2,prefill=flash", "prefill"),
    ("h2o:0.3+paged", "paged: .*cannot evict"),
    ("streaming:100+paged", "paged: .*cannot evict"),
    ("h2o:heavy=4+paged", "paged: .*cannot evict"),
    ("random:0.2+paged:block=4", "paged: .*cannot evict"),
    ("h2o:0.3,prefill=fast", "unknown prefill 'fast'.*flash"),
    ("h2o:0.3,prefill=eagr", "did you mean 'eager'"),
    ("h2o:0.3,prefill=chunked", "chunked:N"),
    ("h2o:0.3,prefill=chunked:", "chunked:N"),
    ("h2o:0.3,prefill=chunked:0", "chunked:N"),
    ("h2o:0.3,prefill=chunked:-5", "chunked:N"),
    ("h2o:0.3,prefill=chunked:2.5", "chunked:N"),
    ("h2o:0.3,prefill=flash:5", "chunked:N"),
    ("h2o:0.3,evict=chunk", "needs prefill=chunked:N"),
    ("h2o:0.3,prefill=chunked-isolated:5,evict=chunk", "needs prefill=chunked:N"),
    ("h2o:0.3,evict=never", "choose from chunk, end"),
]


@pytest.mark.parametrize(("spec", "message"), WRONG)
def test_every_mistake_is_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse(spec)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("spec", ["h2o:1.0+paged", "paged+streaming", "random:1.0+paged", "h2o+paged"])
def test_a_rule_that_never_evicts_goes_with_blocks(spec: str) -> None:
    assert parse(spec).lossless()


@pytest.mark.parametrize(
    ("spec", "lossless"),
    [
        ("h2o:1.0", True),
        ("h2o:0.9", False),
        ("h2o:100000", False),  # it may evict: that depends on the prompt
        ("h2o:heavy=4", False),
        ("streaming:1.0", True),
        ("oracle:1.0,gqa=max", True),
        ("oracle:0.99", False),
        ("infinigen:1.0,alpha=inf", True),
        ("infinigen:1.0", False),
        ("infinigen:0.5,alpha=inf", False),
        ("infinigen:1.0,alpha=inf,pool=0.5", False),
        ("full,prefill=chunked-isolated:8".replace(",", ":"), False),
        ("full:prefill=chunked:8", True),
        ("full:prefill=eager", True),
    ],
)
def test_lossless_is_said_truly(spec: str, lossless: bool) -> None:
    assert parse(spec).lossless() == lossless


def test_a_name_can_be_taken_once() -> None:
    with pytest.raises(UserError, match="registered already"):
        register(Preset("full", {"read": Oracle}, "an impostor"))
    assert register(presets()["full"]) is not None, "registering the same again is no error"


def test_every_field_of_every_answer_can_be_set() -> None:
    """No parameter of a preset is out of a spec's reach (but the budget, which leads), and none hides another."""
    for preset in presets().values():
        names = {(p.question, p.field) for p in preset.parameters().values()}
        for question, answer in preset.answers.items():
            missing = {f.name for f in fields(answer)} - {f for q, f in names if q == question}
            assert missing <= {"budget"}, (preset.name, missing)


@pytest.mark.parametrize("spec", [None, 5, ["full"]])
def test_what_is_no_text_is_a_clear_error(spec: object) -> None:
    with pytest.raises(UserError, match="a strategy is text such as"):
        parse(spec)  # type: ignore[arg-type]
