"""All tasks of the battery, by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvatlas.quality import generated
from kvatlas.quality.drift import FidelityTask
from kvatlas.quality.reasoning import NAMES as REASONING
from kvatlas.quality.task import Task

NAMES = ("retention", *REASONING, *(name for name in generated.NAMES if name != "retention"), "fidelity")


def options_of(name: str) -> tuple[str, ...]:
    """The options that a task knows."""
    if name in REASONING:
        return ("shots", "data_dir")
    if name == "fidelity":
        return tuple(field.name for field in fields(FidelityTask))
    return generated.options_of(name)


def make_task(name: str, **options: Any) -> Task:
    """The task with these options. Raises UserError for one that it does not know, or a value that is not allowed."""
    if name in REASONING:
        from kvatlas.quality.reasoning import reasoning_task

        return reasoning_task(name, **options)
    if name == "fidelity":
        return FidelityTask(**options)
    return generated.generated_task(name, **options)
