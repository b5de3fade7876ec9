"""Presets by name. Each answer's own file registers its preset, so a new strategy is one new file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal, get_type_hints

from kvatlas.errors import UserError, nearest
from kvatlas.strategy.answers import Answer

Question = Literal["keep", "read", "place", "encode"]
QUESTIONS: tuple[Question, ...] = ("keep", "read", "place", "encode")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a preset: which answer's field it sets, its type and its default."""

    question: Question
    field: str
    type: object
    default: object


@dataclass(frozen=True)
class Preset:
    """A name for the answers it gives; the questions it leaves out keep their defaults.

    ``budget`` says which answer takes the spec's leading number (by default the first of keep and read it answers);
    ``names`` gives parameters another name than their field's: ``{"pool": ("keep", "budget")}``. Answers to the
    questions in ``yields`` give way to those of another part of a spec, unless the user set one of their parameters.
    """

    name: str
    answers: Mapping[Question, type[Answer]]
    summary: str
    budget: Question | None = None
    names: Mapping[str, tuple[Question, str]] = field(default_factory=dict)
    yields: tuple[Question, ...] = ()

    @property
    def budgeted(self) -> Question | None:
        """The answer that takes the budget."""
        return self.budget or next((q for q in ("keep", "read") if q in self.answers), None)

    @property
    def source(self) -> str:
        """Paper and section."""
        found = [a.source for a in self.answers.values() if a.source != "-"]
        return found[1] if self.budget == "read" and len(found) > 1 else (found[0] if found else "-")

    def parameters(self) -> dict[str, Parameter]:
        """All that a spec may set, by name."""
        renamed = {target: name for name, target in self.names.items()}
        out = {}
        for question, answer in self.answers.items():
            hints = get_type_hints(answer)
            for f in fields(answer):
                if f.name == "budget" and (question, "budget") not in renamed:
                    continue
                name = renamed.get((question, f.name), f.name)
                default = None if f.default is MISSING else f.default
                out[name] = Parameter(question, f.name, hints[f.name], default)
        return out


_presets: dict[str, Preset] = {}
_loaded = False


def register(preset: Preset) -> Preset:
    """Make a preset known by its name (also from your own code).

    Raises:
        UserError: when the name is taken by another preset.
    """
    known = _presets.get(preset.name)
    if known is not None and known.answers != preset.answers:
        raise UserError(f"a strategy named '{preset.name}' is registered already; choose another name")
    _presets[preset.name] = preset
    return preset


def presets() -> dict[str, Preset]:
    """Every known preset, by name."""
    global _loaded
    if not _loaded:
        _loaded = True
        for question in QUESTIONS:
            package = importlib.import_module(f"kvatlas.strategy.{question}")
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_presets.items()))


def find(name: str) -> Preset:
    """The preset of this name.

    Raises:
        UserError: with the nearest name.
    """
    known = presets()
    if name not in known:
        raise UserError(f"unknown strategy '{name}': {nearest(name, known)}")
    return known[name]
