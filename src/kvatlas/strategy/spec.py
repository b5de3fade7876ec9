"""The spec language: ``name``, ``name:0.3``, ``name:key=value,key=value``, and ``+`` to combine answers.

``prefill=flash|eager|chunked:N|chunked-isolated:N``, ``evict=chunk`` and ``layers=pyramid`` (or weights, one a layer:
``layers=3/2/1``) go with any strategy.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from kvatlas.errors import UserError, nearest
from kvatlas.strategy.answers import Encode, Keep, Read
from kvatlas.strategy.budget import format_budget, parse_budget
from kvatlas.strategy.place.device import Device
from kvatlas.strategy.registry import Parameter, Preset, Question, find
from kvatlas.strategy.strategy import LayerShares, PrefillMode, Strategy

COMMON = ("prefill", "evict", "layers")


@dataclass(frozen=True)
class Part:
    """One ``name:...`` of a spec, checked."""

    preset: Preset
    budget: float | None
    values: dict[str, Any]
    common: dict[str, str]


def parse(spec: str | Strategy) -> Strategy:
    """Spec to strategy.

    Raises:
        UserError: unknown name or parameter (with the nearest), a bad value, a budget that is 0, negative, or above 1
            and not whole, two answers to one question, answers that do not go together.
    """
    if isinstance(spec, Strategy):
        return spec
    if not isinstance(spec, str):
        raise UserError(f"a strategy is text such as 'h2o:0.3', not {type(spec).__name__}")
    if not spec.strip():
        raise UserError("empty strategy: write a name such as 'full' or 'h2o:0.3'")
    if not all(text.strip() for text in spec.split("+")):
        raise UserError(f"'{spec}': nothing stands on one side of a +; write two names, such as 'h2o:0.3+int4'")
    parts = [_parse_part(text.strip()) for text in spec.split("+")]
    answers = _combined(spec, parts)
    defaults: dict[Question, Any] = {"keep": Keep(), "read": Read(), "place": Device(), "encode": Encode()}
    chosen: dict[str, Any] = {q: answers[q][1] if q in answers else default for q, default in defaults.items()}
    common = _common(spec, parts)
    name = "+".join(_format(part) for part in parts)
    strategy = Strategy(name=name, prefill=_prefill(common), layers=_layers(common, chosen["keep"]), **chosen)
    for answer in chosen.values():
        answer.check(strategy)
    if strategy.keep.wants() is not None and strategy.read.wants() not in (None, strategy.keep.wants()):
        raise UserError(
            f"'{spec}': its keep rule and its read rule ask prefill attention for different statistics; keep one"
        )
    return strategy


def _combined(spec: str, parts: list[Part]) -> dict[Question, tuple[str, Any]]:
    """The answers of all parts; those that yield give way."""
    answers: dict[Question, tuple[str, Any]] = {}
    given = [(part, question, answer) for part in parts for question, answer in _answers(part).items()]
    for part, question, answer in sorted(given, key=lambda entry: _yields(*entry[:2])):
        if question in answers:
            if _yields(part, question):
                continue
            raise UserError(
                f"'{spec}': {answers[question][0]} and {part.preset.name} both answer '{question}'; keep one"
            )
        answers[question] = (part.preset.name, answer)
    return answers


def _yields(part: Part, question: Question) -> bool:
    """An answer that the user said nothing about gives way, where its preset lets it."""
    parameters = part.preset.parameters()
    mine = any(parameters[key].question == question for key in part.values)
    budgeted = part.budget is not None and part.preset.budgeted == question
    return question in part.preset.yields and not mine and not budgeted


def _layers(common: dict[str, str], keep: Keep) -> LayerShares | None:
    text = common.get("layers")
    if text is None:
        return None
    if not keep.evicts:
        raise UserError(f"layers={text} divides a keep rule's budget among the layers, and nothing is evicted here")
    if text == "pyramid":
        return LayerShares()
    try:
        weights = tuple(float(w) for w in text.split("/"))
    except ValueError:
        weights = ()
    if not weights or not all(0 < w < float("inf") for w in weights):
        raise UserError(f"layers={text}: write layers=pyramid, or weights above 0, one a layer: layers=3/2/1")
    return LayerShares(weights)


def _common(spec: str, parts: list[Part]) -> dict[str, str]:
    """``prefill`` and ``evict`` of the whole strategy, whichever part they were written in."""
    common: dict[str, str] = {}
    for part in parts:
        for key, value in part.common.items():
            if common.setdefault(key, value) != value:
                raise UserError(f"'{spec}': {key}={common[key]} and {key}={value} contradict each other; keep one")
    return common


def _parse_part(text: str) -> Part:
    name, colon, rest = text.partition(":")
    preset = find(name.strip())
    if colon and not rest.strip():
        raise UserError(f"'{text}' ends after the colon: write {preset.name}, or a budget or key=value after it")
    parameters, budget = preset.parameters(), None
    values: dict[str, Any] = {}
    common: dict[str, str] = {}
    for i, item in enumerate(p.strip() for p in rest.split(",")) if rest.strip() else ():
        key, equals, value = (s.strip() for s in item.partition("="))
        if not equals and i == 0:
            key, value, equals = "budget", key, "="
        if not equals or not value:
            raise UserError(f"{preset.name}: '{item}' is not key=value")
        if key in values or key in common or (key == "budget" and budget is not None):
            raise UserError(f"{preset.name}: {key} is given twice; keep one")
        if key == "budget" and "budget" not in parameters:
            if preset.budgeted is None:
                raise UserError(f"{preset.name} takes no budget: it keeps and reads every token")
            budget = parse_budget(value)
        elif key in COMMON:
            common[key] = value
        elif key in parameters:
            values[key] = _convert(preset, key, value, parameters[key])
        else:
            raise UserError(f"{preset.name} has no parameter '{key}': {nearest(key, [*parameters, 'budget', *COMMON])}")
    return Part(preset, budget, values, common)


def _convert(preset: Preset, key: str, text: str, parameter: Parameter) -> object:
    if parameter.field == "budget":
        return parse_budget(text)
    options = _options(parameter.type)
    for kind in options:
        try:
            return _read(kind, text)
        except ValueError:
            continue
    allowed = " or ".join(_name(kind) for kind in options)
    raise UserError(f"{preset.name}: {key} must be {allowed}, not '{text}'")


def _options(hint: object) -> list[object]:
    if get_origin(hint) in (Union, types.UnionType):
        return [t for t in get_args(hint) if t is not type(None)]
    return [hint]


def _read(kind: object, text: str) -> object:
    if get_origin(kind) is Literal:
        if text in get_args(kind):
            return text
        raise ValueError
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError
    if kind in (int, float, str):
        return kind(text)  # type: ignore[operator]
    raise ValueError


def _name(kind: object) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(str(a) for a in get_args(kind))
    words: dict[object, str] = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(kind, str(kind))


def _answers(part: Part) -> dict[Question, Any]:
    parameters, made = part.preset.parameters(), {}
    for question, answer in part.preset.answers.items():
        arguments = {parameters[k].field: v for k, v in part.values.items() if parameters[k].question == question}
        if part.budget is not None and question == part.preset.budgeted:
            arguments["budget"] = part.budget
        made[question] = answer(**arguments)
    return made


def _prefill(common: dict[str, str]) -> PrefillMode:
    kind, colon, size = common.get("prefill", "flash").partition(":")
    kinds = get_args(Literal["flash", "eager", "chunked", "chunked-isolated"])
    if kind not in kinds:
        raise UserError(f"unknown prefill '{kind}': {nearest(kind, kinds)}")
    chunked = kind.startswith("chunked")
    if chunked != bool(colon) or (colon and (not size.isdigit() or int(size) < 1)):
        raise UserError(
            f"prefill={kind}{colon}{size}: write prefill=flash, eager, chunked:N or chunked-isolated:N with N tokens"
        )
    evict = common.get("evict", "end")
    if evict not in ("chunk", "end"):
        raise UserError(f"evict={evict}: choose from chunk, end")
    if evict == "chunk" and kind != "chunked":
        raise UserError("evict=chunk needs prefill=chunked:N")
    return PrefillMode(kind, int(size) if colon else 0, evict == "chunk")  # type: ignore[arg-type]


def _format(part: Part) -> str:
    parameters = part.preset.parameters()
    shown = [] if part.budget is None else [format_budget(part.budget)]
    for key, value in sorted(part.values.items()):
        if value != parameters[key].default:
            shown.append(f"{key}={_text(value, parameters[key])}")
    shown += [f"{key}={value}" for key, value in sorted(part.common.items())]
    return part.preset.name + (":" + ",".join(shown) if shown else "")


def _text(value: Any, parameter: Parameter) -> str:
    if parameter.field == "budget":
        return format_budget(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
