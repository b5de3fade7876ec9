"""The metrics of a report: where each is found in a record, how it is named, and what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvatlas.measure.record import Figure, Record

Getter = Callable[[Record], Figure | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """One column of the table, one choice of an axis. `shown` says in which unit readers see it."""

    key: str
    group: Literal["Speed", "Memory", "Quality"]
    label: str
    short: str
    shown: Literal["s", "ms", "bytes", "%", "number"]
    better: Literal["less", "more", "neither"]
    of: Getter
    means: str


def _path(*names: str) -> Getter:
    """Follows attributes; a missing section on the way is a missing figure."""

    def of(record: Record) -> Figure | None:
        place: object = record
        for name in names:
            place = getattr(place, name, None)
        return place if isinstance(place, Figure) else None

    return of


def _held(inside: Callable[[str], bool], part: str = "held") -> Getter:
    """Bytes of the tiers that `inside` names."""

    def of(record: Record) -> Figure | None:
        if record.memory is None:
            return None
        tiers = [tier for name, tier in record.memory.tiers.items() if inside(name)]
        return Figure.exact(sum(getattr(tier, part) for tier in tiers), "bytes")

    return of


def _device_peak(record: Record) -> Figure | None:
    tier = record.memory.tiers.get("device") if record.memory else None
    return None if tier is None or tier.peak is None else Figure.exact(tier.peak, "bytes")


def _realised(part: str) -> Getter:
    """From the timed run, else from the quality run."""
    return lambda record: _path("realised", part)(record) or _path("quality", "realised", part)(record)


def _device(name: str) -> bool:
    return name == "device"


METRICS: tuple[Metric, ...] = (
    Metric("ttft", "Speed", "Time to first token", "TTFT", "s", "less", _path("timing", "ttft"),
           "TTFT. From the start of the prefill until the first token is out and the cache is ready for the next step, "
           "for the whole batch. It includes compression, which is also shown apart."),
    Metric("compression", "Speed", "Compression's share of TTFT", "compress", "s", "less",
           _path("timing", "compression"),
           "The part of TTFT that the strategy spent on choosing what to keep and on bringing it into its form."),
    Metric("setup", "Speed", "Set-up, once a model", "set-up", "s", "less", _path("timing", "setup"),
           "Work done once for a model, not for a prompt (calibration, SVD, codebooks, compiling). In no other time."),
    Metric("tpot", "Speed", "Time per output token, median", "TPOT", "ms", "less", _path("timing", "tpot"),
           "TPOT. Wall time of one decode step of the whole batch, which gives one token to every sequence; median of "
           "the steps."),
    Metric("tpot_p95", "Speed", "Time per output token, 95th percentile", "p95", "ms", "less",
           _path("timing", "tpot_p95"), "Nineteen of twenty decode steps were at least this fast."),
    Metric("tokens_per_s", "Speed", "Tokens per second", "tok/s", "number", "more", _path("timing", "tokens_per_s"),
           "New tokens of all sequences of the batch in a second of decoding."),
    Metric("per_gb_device", "Speed", "Tokens/s per GB of KV on device", "tok/s/GB dev", "number", "more",
           _path("memory", "tokens_per_s_per_gb", "device_kv"),
           "Tokens per second divided by the GB (10⁹ bytes) of KV held on the device."),
    Metric("per_gb_all", "Speed", "Tokens/s per GB of KV in all tiers", "tok/s/GB all", "number", "more",
           _path("memory", "tokens_per_s_per_gb", "all_tiers"),
           "Tokens per second divided by the GB of KV held in all tiers together."),
    Metric("per_gb_peak", "Speed", "Tokens/s per GB of process peak", "tok/s/GB peak", "number", "more",
           _path("memory", "tokens_per_s_per_gb", "process_peak"),
           "Tokens per second divided by the GB of the process's peak memory, model weights included."),
    Metric("device", "Memory", "KV bytes held on device", "KV dev", "bytes", "less", _held(_device),
           "Storage of the tensors that the cache holds on the device at the end of the run: payload, metadata and "
           "padding, whole batch."),
    Metric("device_peak", "Memory", "Most KV bytes on device", "KV dev peak", "bytes", "less", _device_peak,
           "The most that the cache held on the device at any time, prefill included."),
    Metric("metadata", "Memory", "of it metadata", "meta", "bytes", "less", _held(_device, "metadata"),
           "Bytes on the device that are not keys or values: positions, scores, partial keys, bounds."),
    Metric("padding", "Memory", "of it padding", "padding", "bytes", "less", _held(_device, "padding"),
           "Bytes on the device that are allocated and hold no token."),
    Metric("other_tiers", "Memory", "KV bytes held in other tiers", "KV host", "bytes", "less",
           _held(lambda name: name != "device"), "The same for tiers other than the device (host memory, disk)."),
    Metric("all_tiers", "Memory", "KV bytes held in all tiers", "KV all", "bytes", "less", _held(lambda name: True),
           "Device and all other tiers together."),
    Metric("read", "Memory", "KV bytes read a step", "read/step", "bytes", "less",
           _path("memory", "read_per_step"), 
           "Payload that attention reads in one decode step, all layers and the whole batch."),
    Metric("scanned", "Memory", "Bytes scanned by selection a step", "scan/step", "bytes", "less",
           _path("memory", "scanned_per_step"),
           "What the strategy reads in one step to decide which tokens to read or to drop."),
    Metric("peak_prefill", "Memory", "Process peak in prefill", "peak prefill", "bytes", "less",
           _path("memory", "prefill_peak"),
           "Most memory that the process had while it prefilled: weights, activations, cache and libraries."),
    Metric("peak_decode", "Memory", "Process peak in decode", "peak decode", "bytes", "less",
           _path("memory", "decode_peak"), "The same while it decoded."),
    Metric("transfers", "Memory", "Transfers a step", "copies/step", "number", "less", _path("transfers", "count"),
           "Copies between tiers for one decode step."),
    Metric("moved", "Memory", "Bytes transferred a step", "moved/step", "bytes", "less", _path("transfers", "bytes"),
           "Bytes of those copies."),
    Metric("blocked", "Memory", "Time blocked by transfers a step", "blocked/step", "ms", "less",
           _path("transfers", "blocked"),
           "Time that computing waited for those copies; what was overlapped with computing is not in it."),
    Metric("kept", "Quality", "Kept fraction", "kept", "%", "neither", _realised("kept"),
           "Tokens kept over tokens seen, as realised, mean over layers, heads and sequences."),
    Metric("read_fraction", "Quality", "Read fraction", "read", "%", "neither", _realised("read"),
           "Tokens that a step attended to over tokens seen, as realised."),
    Metric("perplexity", "Quality", "Perplexity", "PPL", "number", "less", _path("quality", "perplexity"),
           "Of the text's real continuation, read token by token through the cache."),
    Metric("kl", "Quality", "KL divergence to the reference", "KL", "number", "less", _path("quality", "kl"),
           "Mean over tokens of KL(reference ‖ strategy) of the next-token distributions, in nats. 0 is no loss."),
    Metric("top1", "Quality", "Top-1 agreement", "top-1", "%", "more", _path("quality", "top1"),
           "Share of tokens at which strategy and reference have the same most likely next token."),
    Metric("recall", "Quality", "Recall of told facts", "recall", "%", "more", _path("quality", "recall"),
           "Share of small conversations in which a fact told early is given back when it is asked for at the end."),
)  # fmt: skip

BY_KEY = {metric.key: metric for metric in METRICS}
GROUPS = ("Speed", "Memory", "Quality")


def present(records: list[Record], group: str | None = None) -> list[Metric]:
    """Metrics that at least one record has, in order, without byte columns that are zero everywhere."""
    chosen = [metric for metric in METRICS if group in (None, metric.group)]
    return [metric for metric in chosen if any(_tells(metric, record) for record in records)]


def _tells(metric: Metric, record: Record) -> bool:
    figure = metric.of(record)
    return figure is not None and (figure.value != 0 or metric.key in {"kl", "device", "all_tiers"})
