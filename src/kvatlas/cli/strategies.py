"""``kvatlas strategies``: the presets and what they answer."""

from __future__ import annotations

import json
from typing import Any, get_args

from kvatlas.strategy.registry import QUESTIONS, Parameter, Preset, find, presets
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import Strategy

COMMON = "Every strategy also takes prefill=flash|eager|chunked:N|chunked-isolated:N, and with chunked:N evict=chunk."


def show(names: list[str], as_json: bool) -> None:
    """Print them all, or those named (a spec shows its own answers)."""
    chosen = [(name, parse(name)) for name in names] if names else [(name, parse(name)) for name in presets()]
    facts = [described(name, strategy) for name, strategy in chosen]
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for fact in facts:
        _print(fact)
    print(COMMON)
    print("A budget is the number after the colon: 1.0 is unlimited, 0.3 is 30 % of the tokens, 256 is 256 tokens.")


def described(name: str, strategy: Strategy) -> dict[str, Any]:
    """All there is to say of one."""
    parts = [find(part.partition(":")[0].strip()) for part in name.split("+")]
    return {
        "name": name,
        "summary": "; ".join(part.summary for part in parts),
        "source": "; ".join(dict.fromkeys(part.source for part in parts)),
        "lossless": strategy.lossless(),
        "answers": strategy.answers(),
        "answered": [question for question in QUESTIONS if any(question in part.answers for part in parts)],
        "budget": next((part.budgeted for part in parts if part.budgeted), None),
        "parameters": [_parameter(key, p) for part in parts for key, p in _sorted(part)],
    }


def _sorted(part: Preset) -> list[tuple[str, Parameter]]:
    return sorted(part.parameters().items(), key=lambda item: QUESTIONS.index(item[1].question))


def _parameter(key: str, parameter: Parameter) -> dict[str, Any]:
    return {"name": key, "answers": parameter.question, "type": _type(parameter), "default": parameter.default}


def _type(parameter: Parameter) -> str:
    if parameter.field == "budget":
        return "budget"
    kinds = [kind for kind in get_args(parameter.type) if kind is not type(None)] or [parameter.type]
    words = {int: "whole number", float: "number", bool: "true|false", str: "text"}
    return "|".join(words.get(kind) or "|".join(map(str, get_args(kind))) or str(kind) for kind in kinds)


def _print(fact: dict[str, Any]) -> None:
    budget = f"[:BUDGET of {fact['budget']}]" if fact["budget"] else ""
    print(f"{fact['name']}{budget} - {fact['summary']}")
    for question in QUESTIONS:
        mark = "*" if question in fact["answered"] else " "
        print(f"  {mark} {question:<7} {fact['answers'][question]}")
    for parameter in fact["parameters"]:
        default = _default(parameter["default"])
        print(f"      {parameter['name']}={default}  ({parameter['answers']}; {parameter['type']})")
    print(f"    source  {fact['source'] if fact['source'] != '-' else 'none: it is the plain thing'}\n")


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
