"""What a battery was asked to do: strategies at budgets, tasks with their options, checked as far as needs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas.errors import UserError, nearest
from kvatlas.measure.record import REFERENCE
from kvatlas.model.load import DTYPES, LOAD_FORMATS
from kvatlas.strategy.budget import format_budget, parse_budget
from kvatlas.strategy.spec import parse
from kvatlas.study.plan import check_device, check_numbers, default_threads, one_of, out_folder, split_specs

STRATEGIES = "h2o,recall,infinigen,quest"
TASKS = "retention,reasoning,retrieval,fidelity"
GROUPS = {
    "reasoning": ("hellaswag", "piqa", "boolq", "openbookqa", "winogrande", "arc_easy"),
    "retrieval": ("needle", "keyvalue", "topics"),
}
"""Names that stand for several tasks: the six of the study's kind, and what retrieves (``lines`` is too hard for small
models, and asked for by its own name)."""

LIMITS = {"retention": 80, "fidelity": 6, "needle": 20, "keyvalue": 20, "lines": 20, "topics": 20}
SHOTS = 5
"""Answered examples before a reasoning question: without them a context is too short for a budget to bite."""

REASONING_LIMIT = 32
"""Samples of each task unless the user says otherwise: sized so that the default battery ends within the hour on two
cores."""


@dataclass(frozen=True, slots=True)
class Point:
    """A strategy at a budget, as written in a spec: one point of its family's curve."""

    spec: str
    family: str
    budget: float | int | None


@dataclass(frozen=True)
class Battery:
    """Points x tasks on one model. ``tasks`` goes from a name to its options; ``limit`` None: each task's own."""

    model: str
    points: tuple[Point, ...]
    tasks: Mapping[str, Mapping[str, Any]]
    out: Path
    limit: int | None = None
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    load_format: str = "auto"
    timeout: float = 14400.0
    retry: bool = False

    def limit_of(self, task: str) -> int:
        """Samples of a task."""
        return self.limit if self.limit is not None else LIMITS.get(task, REASONING_LIMIT)

    def job(self) -> dict[str, Any]:
        """All of it as plain JSON."""
        return {
            "model": self.model,
            "points": [[point.spec, point.family, point.budget] for point in self.points],
            "tasks": {name: dict(options) for name, options in self.tasks.items()},
            "limits": {name: self.limit_of(name) for name in self.tasks},
            "out": str(self.out),
            "seed": self.seed,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "load_format": self.load_format,
            "text_file": None,
            "retry": self.retry,
        }


def make_battery(
    *, model: str, strategies: str, budgets: str, tasks: str, out: str | None, limit: int | None, threads: int | None,
    dtype: str, options: Mapping[str, Any], **rest: Any,
) -> Battery:  # fmt: skip
    """A battery from what the user wrote; ``options`` are those of tasks, None where not given.

    Raises:
        UserError: an unknown strategy or task, a budget or limit out of range, an option that no task of them has, a
            folder that cannot be written.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be 1 sample or more, not {limit}")
    check_numbers(rest, threads)
    one_of("--dtype", dtype, DTYPES)
    one_of("--load-format", rest.get("load_format", "auto"), LOAD_FORMATS)
    check_device(rest.get("device", "cpu"))
    chosen = points(strategies, budgets)
    folder = Path(out).expanduser() if out else Path("runs") / f"{Path(model.rstrip('/')).name or 'model'}-quality"
    return Battery(
        model=model,
        points=tuple(chosen),
        tasks=chosen_tasks(tasks, options),
        out=out_folder(str(folder), model, {}),
        limit=limit,
        threads=threads or default_threads(),
        dtype="float32" if dtype == "auto" else dtype,
        **rest,
    )


def points(strategies: str, budgets: str) -> list[Point]:
    """``full``, and every strategy at every budget. A strategy that takes no budget, or names its own, is one point."""
    sizes = [_budget(text.strip()) for text in budgets.split(",") if text.strip()]
    if not sizes:
        raise UserError("no budgets given; write for example --budgets 1.0,0.5,0.3,0.2,0.1")
    found = {REFERENCE: Point(REFERENCE, REFERENCE, None)}
    for written in _given(strategies):
        for point in _points(written, sizes):
            known = next((p for p in found.values() if parse(p.spec).name == parse(point.spec).name), None)
            if known is None:
                found[point.spec] = point
    return list(found.values())


def _given(strategies: str) -> list[str]:
    found = split_specs(strategies)
    if not found:
        raise UserError(f"no strategies given; write for example --strategies {STRATEGIES}")
    return found


def _points(written: str, sizes: Sequence[float]) -> list[Point]:
    """The points of one strategy."""
    if _with_budget(written, sizes[0]) is None:
        return [Point(written, parse(written).name, None)]
    parts = [_taken_apart(part) for part in written.split("+")]
    own = next((i for i, (_, budget, _) in enumerate(parts) if budget), None)
    if own is None:
        return [Point(spec, written, _number(size)) for size in sizes if (spec := _with_budget(written, size))]
    parse(written)
    name, budget, rest = parts[own]
    others = written.split("+")
    others[own] = name + (f":{rest}" if rest else "")
    return [Point(written, "+".join(others), _number(parse_budget(budget)))]


def _taken_apart(part: str) -> tuple[str, str, str]:
    """``h2o:0.3,a=b`` -> ``h2o``, ``0.3`` and ``a=b``; what it does not have is empty."""
    name, _, rest = part.partition(":")
    first, _, others = rest.partition(",")
    return (name, "", rest) if "=" in first else (name, first, others)


def _number(budget: float) -> float | int:
    """A fraction as a float, tokens as an int."""
    return 1 if budget == -1.0 else int(budget) if budget > 1 else budget


def _with_budget(written: str, size: float) -> str | None:
    """The spec with this budget in its first part that takes one; None where none does."""
    parts = written.split("+")
    for i, part in enumerate(parts):
        name, _, rest = _taken_apart(part)
        spec = "+".join([*parts[:i], f"{name}:{format_budget(size)}" + (f",{rest}" if rest else ""), *parts[i + 1 :]])
        try:
            parse(spec)
        except UserError as error:
            if "takes no budget" in str(error):
                continue
            raise
        return spec
    return None


def _budget(text: str) -> float:
    try:
        return parse_budget(text)
    except UserError as error:
        raise UserError(f"--budgets: {error}") from None


def chosen_tasks(texts: str, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each task's own part of the options. Raises UserError for an unknown task or an option that none of them has."""
    from kvatlas.quality import battery_tasks

    names = [name for text in texts.split(",") if text.strip() for name in GROUPS.get(text.strip(), (text.strip(),))]
    if not names:
        raise UserError(f"no tasks given; write for example --tasks {TASKS}")
    known_names = [*battery_tasks.NAMES, *GROUPS]
    strange = [name for name in names if name not in battery_tasks.NAMES]
    if strange:
        raise UserError("; ".join(f"unknown task '{name}'; {nearest(name, known_names)}" for name in strange))
    given = {key: value for key, value in options.items() if value is not None}
    known = {name: battery_tasks.options_of(name) for name in dict.fromkeys(names)}
    for key in given:
        if key != "data_dir" and not any(key in own for own in known.values()):
            raise UserError(f"--{key.replace('_', '-')} means nothing to {', '.join(known)}")
    usual = {"shots": SHOTS}
    return {name: {k: v for k, v in (usual | given).items() if k in own} for name, own in known.items()}
