"""The findings of a comparison in words, computed from its records. Nothing here knows a method's name."""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.measure.record import Figure, Record
from kvatlas.report.cells import Cell, name
from kvatlas.report.metrics import BY_KEY
from kvatlas.report.show import duration, number, share, size, times

SAME = 0.05  # two speeds nearer than this are called the same
EXACT = 1e-6  # nats: less than float32 can tell


def headline(cell: Cell) -> str:
    """One sentence: the main finding."""
    if not cell.ok:
        return "No strategy finished"
    base = cell.reference
    others = [record for record in cell.ok if record is not base]
    if base is None or not others:
        return _alone(cell.ok)
    fastest = _best(others, "tokens_per_s", max)
    ratio = _ratio(fastest, base, "tokens_per_s") if fastest else None
    if fastest is None or ratio is None:
        return _nearest_sentence(others, base) or f"{len(cell.ok)} strategies ran"
    if ratio <= 1 + SAME or _overlap(fastest, base, "tokens_per_s"):
        return f"No strategy was clearly faster than {name(base)} here{_joined(_nearest_clause(others, base))}"
    alike = [record for record in others if _overlap(record, fastest, "tokens_per_s")]
    if len(alike) > 1:
        fastest = _best(alike, "kl", min) or fastest
        ratio = _ratio(fastest, base, "tokens_per_s") or ratio
    place = "among the fastest" if len(alike) > 1 else "fastest"
    return f"{name(fastest)} was {place}, at {times(ratio)} {name(base)}’s speed{_joined(_cost(fastest, base))}"


def findings(cell: Cell) -> list[str]:
    """Further sentences: nearest to the reference, least memory, most facts, quickest first token."""
    base = cell.reference
    others = [record for record in cell.ok if record is not base]
    if base is None or not others:
        return []
    told = (_nearest_sentence(others, base), _smallest(others, base), _facts(others, base), _first_token(others, base))
    return [sentence for sentence in told if sentence]


def _alone(ok: list[Record]) -> str:
    fastest = _best(ok, "tokens_per_s", max)
    if fastest is None:
        return f"{len(ok)} strategies ran, none with a speed"
    speed = number(_value(fastest, "tokens_per_s") or 0)
    if len(ok) == 1:
        return f"{name(fastest)} ran at {speed} tokens/s; there is nothing to compare it with"
    return f"{name(fastest)} was fastest, at {speed} tokens/s; the reference is not among these records"


def _cost(record: Record, base: Record) -> str:
    """What a strategy saves and loses against the reference: bytes, then the first loss that was measured."""
    parts = []
    if (held := _ratio(record, base, "device")) is not None:
        parts.append(f"with {_of_bytes(held)} of its KV bytes on the device")
    parts.append(_loss(record, base))
    return "".join(parts)


def _of_bytes(ratio: float) -> str:
    return f"{ratio * 100:.0f} %" if ratio < 1.995 else f"{ratio:.1f} times"


def _loss(record: Record, base: Record) -> str:
    mine, theirs = _figure(record, "recall"), _figure(base, "recall")
    if mine and theirs:
        same = ", too few to tell apart" if _overlap(record, base, "recall") and mine.value != theirs.value else ""
        lead = ", but" if mine.value < theirs.value else "; it"
        return f"{lead} recalled {share(mine)} facts (reference {share(theirs)}{same})"
    if (top1 := _figure(record, "top1")) is not None:
        return f"; it agreed with the reference on {share(top1)} of tokens"
    kl = _figure(record, "kl")
    return f"; KL {number(kl.value)} nats" if kl else ""


def _nearest_clause(others: list[Record], base: Record) -> str:
    nearest = _best([record for record in others if record not in _lossless(others)], "kl", min)
    if nearest is None:
        return ""
    return f"; {name(nearest)} stayed nearest to it (KL {number(_value(nearest, 'kl') or 0)} nats)"


def _lossless(others: list[Record]) -> list[Record]:
    return [record for record in others if (kl := _value(record, "kl")) is not None and abs(kl) < EXACT]


def _nearest_sentence(others: list[Record], base: Record) -> str:
    exact = _lossless(others)
    same = f"Same as {name(base)} (KL 0): {_and([name(record) for record in exact])}. " if exact else ""
    nearest = _best([record for record in others if record not in exact], "kl", min)
    if nearest is None:
        return same.strip()
    others_only = " of the others" if exact else ""
    kl = number(_value(nearest, "kl") or 0)
    said = f"{same}Nearest to {name(base)}{others_only}: {name(nearest)}, KL {kl} nats"
    if (top1 := _figure(nearest, "top1")) is not None:
        said += f", same top token on {share(top1)} of tokens"
    if (ratio := _ratio(nearest, base, "tpot")) is not None:
        said += f", at {times(ratio)} its time per token"
    if (read := _ratio(nearest, base, "read")) is not None:
        said += f", reading {_of_bytes(read)} of its bytes a step"
    return said + "."


def _smallest(others: list[Record], base: Record) -> str:
    least = _best(others, "all_tiers", min)
    ratio = _ratio(least, base, "all_tiers") if least else None
    if least is None or ratio is None:
        return ""
    if ratio >= 1 - SAME:
        return f"No strategy held clearly fewer bytes than {name(base)} over all tiers."
    tied = [name(record) for record in others if _value(record, "all_tiers") == _value(least, "all_tiers")]
    held = size(_value(least, "all_tiers") or 0)
    return f"Least memory over all tiers: {_and(tied)}, {held}, {_of_bytes(ratio)} of {name(base)}’s."


def _facts(others: list[Record], base: Record) -> str:
    mine = _figure(base, "recall")
    figures = [(record, figure) for record in others if (figure := _figure(record, "recall"))]
    if mine is None or not figures:
        return ""
    below = [record for record, figure in figures if figure.value < mine.value]
    lost = [name(record) for record in below if not _overlap(record, base, "recall")]
    if not lost:
        return f"Recall: {name(base)} gave back {share(mine)} facts; no strategy was clearly below it at this n."
    best = max(figure.value for _, figure in figures)
    top = [name(record) for record, figure in figures if figure.value == best]
    top_share = share(next(figure for _, figure in figures if figure.value == best))
    said = f"Recall: {name(base)} gave back {share(mine)} facts, the best other {top_share} ({_and(top)})"
    return f"{said}; clearly below: {_and(lost)}."


def _first_token(others: list[Record], base: Record) -> str:
    slowest = _best(others, "ttft", max)
    ratio = _ratio(slowest, base, "ttft") if slowest else None
    if slowest is None or ratio is None:
        return ""
    if ratio < 1.1:
        return f"First token: no strategy took over {max(ratio, 1.0):.2f} × {name(base)}’s time."
    took = duration(_value(slowest, "ttft") or 0)
    return f"First token: {name(slowest)} was slowest, {took}, {times(ratio)} {name(base)}’s."


def _joined(clause: str) -> str:
    return clause if not clause or clause[0] in ";," else f", {clause}"


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _figure(record: Record, key: str) -> Figure | None:
    return BY_KEY[key].of(record)


def _value(record: Record, key: str) -> float | None:
    figure = _figure(record, key)
    return figure.value if figure else None


def _ratio(record: Record, base: Record, key: str) -> float | None:
    mine, theirs = _value(record, key), _value(base, key)
    return mine / theirs if mine is not None and theirs else None


def _best(records: list[Record], key: str, pick: Callable[..., Record]) -> Record | None:
    having = [record for record in records if _value(record, key) is not None]
    return pick(having, key=lambda record: _value(record, key)) if having else None


def _overlap(one: Record, two: Record, key: str) -> bool:
    """Whether two intervals touch; without intervals, whether the values are equal."""
    (low, high), (other_low, other_high) = _ends(_figure(one, key)), _ends(_figure(two, key))
    return low <= other_high and other_low <= high


def _ends(figure: Figure | None) -> tuple[float, float]:
    if figure is None:
        return float("-inf"), float("inf")
    return (figure.value if figure.low is None else figure.low), (figure.value if figure.high is None else figure.high)
