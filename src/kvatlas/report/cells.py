"""Records that may be compared with each other: same model, workload and setting."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvatlas.measure.record import REFERENCE, Record
from kvatlas.report.show import plain, size

STATUS = {"out_of_memory": "out of memory", "timeout": "timed out", "failed": "failed"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One model, workload and setting, with a record a strategy. Names are unique and have a colour (`tone`) each."""

    records: tuple[Record, ...]

    @property
    def ok(self) -> list[Record]:
        return [record for record in self.records if record.status == "ok"]

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.records if record.status != "ok"]

    @property
    def reference(self) -> Record | None:
        """The strategy that the others' quality was compared with, if it ran."""
        named = {record.quality.reference for record in self.ok if record.quality} or {REFERENCE}
        return next((record for record in self.ok if record.strategy.asked in named), None)

    @property
    def title(self) -> str:
        """Model, sizes and setting in a line."""
        one = (self.ok or self.records)[0]
        work, how = one.workload, one.setting
        kernel = ", native kernel" if how.native_kernel else ""
        threads = f" ({how.threads} threads)" if how.device == "cpu" else ""
        return plain(
            f"{one.model.name}, {work.batch} × {work.prompt_tokens:,} prompt tokens, {work.new_tokens:,} new tokens, "
            f"{how.dtype}, prefill {how.prefill}, {how.device}{threads}{kernel}"
        )


def name(record: Record) -> str:
    return plain(record.strategy.asked)


def cells(records: Iterable[Record]) -> list[Cell]:
    """Groups records by what was asked of them, in the order in which they came; the reference comes first."""
    groups: dict[str, dict[str, Record]] = {}
    for record in records:
        groups.setdefault(_same(record), {})[record.strategy.asked] = record
    return [_reference_first(Cell(tuple(group.values()))) for group in groups.values()]


def _reference_first(cell: Cell) -> Cell:
    first = cell.reference
    return Cell(tuple(sorted(cell.records, key=lambda record: record is not first)))


def _same(record: Record) -> str:
    """What two records must share to be compared."""
    if record.asked:
        return json.dumps(record.asked, sort_keys=True)
    work, how = record.workload, record.setting
    shape = (work.text_sha256, work.prompt_tokens, work.new_tokens, work.batch, work.seed)
    return json.dumps([record.model.name, *shape, how.dtype, how.prefill, how.device, how.threads])


def tones(all_cells: Sequence[Cell]) -> dict[str, int]:
    """A colour number for each strategy, the same everywhere in a report. 0 is the reference's."""
    references = {name(cell.reference) for cell in all_cells if cell.reference}
    others = [name(record) for cell in all_cells for record in cell.records]
    ordered = [one for one in dict.fromkeys(others) if one not in references]
    return dict.fromkeys(references, 0) | {one: 1 + index for index, one in enumerate(ordered)}


Fact = tuple[str, Callable[[Record], str | None]]


def _architecture(record: Record) -> str | None:
    model = record.model
    if model.layers is None:
        return model.architecture or None
    heads = f"{model.query_heads} query / {model.kv_heads} KV heads of {model.head_dim}"
    trained = f", trained on {model.positions:,} positions" if model.positions else ""
    return f"{model.architecture + ': ' if model.architecture else ''}{model.layers} layers, {heads}{trained}"


def _hardware(record: Record) -> str:
    here = record.environment
    extra = f", {here.accelerator}" if here.accelerator else ""
    return f"{here.cpu}, {here.cores} cores, {size(here.memory_bytes)} memory{extra}"


def _workload(record: Record) -> str:
    work = record.workload
    past = ", beyond the trained positions (speed and memory only)" if work.beyond_trained else ""
    return (
        f"{work.batch} sequences, {work.prompt_tokens:,} prompt tokens and {work.new_tokens:,} new tokens each, "
        f"seed {work.seed}{past}"
    )


def _setting(record: Record) -> str:
    how = record.setting
    kernel = "native C++ kernel" if how.native_kernel else "no native kernel"
    link = f", link emulated at {how.link_gb_per_s:g} GB/s" if how.link_gb_per_s else ""
    return f"{how.dtype}, prefill {how.prefill}, {how.device}, {how.threads} threads, {kernel}{link}"


def _quality(record: Record) -> str | None:
    how = record.quality
    if how is None:
        return None
    context = f", context {how.context_tokens:,} tokens" if how.context_tokens else ""
    text = f", text sha256 {how.text_sha256}" if how.text_sha256 else ""
    asked = f"question {how.question} compression, turns {how.turns}"
    return f"in {how.dtype}, against {how.reference}, {asked}{context}{text}"


FACTS: tuple[Fact, ...] = (
    ("Model", lambda r: f"{r.model.name}{f' from {r.model.source}' if r.model.source else ''}"),
    ("Architecture", _architecture),
    ("Weights", lambda r: r.model.weights or None),
    ("Weights stored as", lambda r: r.model.stored or None),
    ("Workload", _workload),
    ("Text", lambda r: f"{r.workload.text}, sha256 {r.workload.text_sha256}"),
    ("Calibration text", lambda r: r.workload.calibration_sha256 and f"sha256 {r.workload.calibration_sha256}"),
    ("Setting", _setting),
    ("Quality measured", _quality),
    ("Hardware", _hardware),
    ("System", lambda r: r.environment.system or None),
    ("Versions", lambda r: f"kvatlas {r.environment.kvatlas}, torch {r.environment.torch}, "
                           f"transformers {r.environment.transformers}, Python {r.environment.python}"),
)  # fmt: skip


def facts(cell: Cell) -> list[tuple[str, list[str]]]:
    """Every fact with its values: one where all records agree, else each with the strategies it holds for."""
    told = []
    for label, of in FACTS:
        values: dict[str, list[str]] = {}
        for record in cell.ok or cell.records:
            if value := of(record):
                values.setdefault(plain(value), []).append(name(record))
        if len(values) == 1 and label != "Calibration text":
            told.append((label, list(values)))
        elif values:
            told.append((label, _by_strategy(values)))
    return [*told, ("Written", [_when(cell)])]


def _by_strategy(values: dict[str, list[str]]) -> list[str]:
    """Each value with the strategies it holds for; the commonest one holds for all others."""
    common = max(values, key=lambda value: len(values[value]))
    rest = [f"{value} ({', '.join(who)})" for value, who in values.items() if value != common]
    return [f"{common} (all others)" if rest else f"{common} ({', '.join(values[common])})", *rest]


def _when(cell: Cell) -> str:
    times = sorted(plain(record.environment.time) for record in cell.records)
    return times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"


def cautions(cell: Cell) -> list[str]:
    """What a reader must know before comparing: different machines, versions, logical tiers, emulated links."""
    ok = cell.ok
    said = []
    if len({_hardware(record) for record in ok}) > 1:
        said.append("Records come from different machines: their speeds cannot be compared.")
    if len({(record.setting.dtype, record.setting.native_kernel) for record in ok}) > 1:
        said.append("Records differ in dtype or kernel: compare speeds and bytes only where these are equal.")
    if any(record.memory and record.memory.tiers_logical for record in ok):
        said.append(
            "Tiers are logical here: on a CPU, device and host are the same memory. Bytes are counted by where the "
            "strategy places them, and transfers are what an accelerator would have to fetch."
        )
    if any(record.setting.link_gb_per_s for record in ok):
        said.append("The link between tiers is emulated: a transfer takes as long as at the stated speed.")
    if any(record.workload.beyond_trained for record in ok):
        said.append("The prompt is longer than the model was trained on: read speed and memory, not quality.")
    return said
