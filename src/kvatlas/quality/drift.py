"""The fidelity task: a long text read through each strategy token by token, and how far it drifts from ``full``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.measure.record import REFERENCE
from kvatlas.model.facts import check_prompt
from kvatlas.quality.asking import footprint_of
from kvatlas.quality.asking_batches import batches
from kvatlas.quality.fidelity import divergence
from kvatlas.quality.question import Choice, Question
from kvatlas.quality.reading import Progress, compressed, part_of
from kvatlas.quality.replies import Replies
from kvatlas.quality.task import Found, Metric, Sample, Task
from kvatlas.workload.text import Prompt, Text, default_text, file_text, prompts

BINS = (16, 64, 256, 1024, 4096)
"""Last positions of the bins, counted from the first token after the context."""


@dataclass(frozen=True)
class FidelityTask(Task):
    """KL divergence to ``full``, agreement with its first choice, and the text's log-perplexity, by position.

    Each window of the text is a context, of which all but the last token is prefilled and compressed, and how the text
    really goes on, fed one token at a time. A sample is one window's mean over a stretch of positions (up to 16, 17-64,
    65-256, ...), so that drift is seen. KL leads: perplexity alone can get better under a loss.

    Attributes:
        context: tokens of a window before the part that is read.
        read: tokens that are read.
        text: a UTF-8 file; None: Python's manual.
    """

    context: int = 1024
    read: int = 256
    text: str | None = None

    name = "fidelity"
    metrics = (
        Metric("kl", "value", "nats", higher_is_better=False),
        Metric("top1", "value", "share"),
        Metric("log_perplexity", "value", "nats", higher_is_better=False),
    )

    def __post_init__(self) -> None:
        if self.context < 2 or self.read < 1:
            raise UserError(f"fidelity needs a context of 2 tokens and 1 to read, not {self.context} and {self.read}")

    def about(self) -> dict[str, str | int | float | bool]:
        text = self._text()
        return {"context": self.context, "read": self.read, "text": text.name, "sha256": text.sha256[:12]}

    def _text(self) -> Text:
        """The part of the text that calibration never sees."""
        return (file_text(self.text) if self.text else default_text()).split()[1]

    def windows(self, lm: LM, limit: int) -> list[Prompt]:
        """``limit`` windows in different places of the text. Raises UserError where it or the model is too short."""
        if limit < 1:
            raise UserError(f"limit must be at least 1 sample, not {limit}")
        if lm.tokenizer is None:
            raise UserError("fidelity reads a text, and this model has no tokenizer")
        check_prompt(lm.facts, self.context, self.read)
        return prompts(lm.tokenizer, self._text(), limit, self.context, self.read)

    def run(
        self,
        lm: LM,
        specs: Sequence[str],
        limit: int,
        seed: int,
        progress: Progress | None,
        kept: Replies | None = None,
    ) -> dict[str, Found]:
        windows = self.windows(lm, limit)
        found = {spec: Found() for spec in specs}
        asked = [Question(f"window-{i:03d}", w.ids, choices=(Choice(w.continuation),)) for i, w in enumerate(windows)]
        together = batches(lm, asked)
        for number, rows in enumerate(together):
            part = part_of(progress, number / len(together), 1 / len(together))
            self._read(lm, found, [windows[i] for i in rows], [asked[i] for i in rows], part)
        return found

    def _read(
        self, lm: LM, found: dict[str, Found], windows: list[Prompt], asked: list[Question], progress: Progress
    ) -> None:
        """One batch of windows under every strategy, the reference first."""
        device = lm.facts.device
        following = torch.tensor([w.continuation for w in windows], device=device)
        fed = torch.cat([torch.tensor([w.ids[-1:] for w in windows], device=device), following[:, :-1]], 1)
        contexts, reference = [w.ids[:-1] for w in windows], list[Tensor]()
        progress("prefill", 0.0)
        order = [REFERENCE, *(spec for spec in found if spec != REFERENCE)]
        for done, (spec, cache) in enumerate(compressed(lm, order, contexts, self.read)):
            values = torch.zeros(len(self.metrics), len(windows), self.read, dtype=torch.float64)
            for i in range(self.read):
                logits = lm.step(cache, fed[:, i])
                if spec == REFERENCE:
                    reference.append(logits.cpu())
                if i == 0 and spec in found:
                    found[spec].footprints += [footprint_of(cache)] * len(windows)
                values[:, :, i] = _compare(reference[i].to(device), logits, following[:, i])
                progress(spec, (done + (i + 1) / self.read) / len(order))
            if spec in found:
                found[spec].samples += self._samples(asked, values)

    def _samples(self, asked: list[Question], values: Tensor) -> list[Sample]:
        """``values [metrics, windows, read]`` as means over each window's bins."""
        made = []
        for row, question in enumerate(asked):
            for first, last in bins(self.read):
                means = values[:, row, first:last].mean(-1).tolist()
                label = f"{first + 1}-{last}"
                metrics = {metric.name: mean for metric, mean in zip(self.metrics, means)}
                made.append(Sample(f"{question.name}/{label}", metrics, {"position": label}))
        return made


def bins(read: int) -> list[tuple[int, int]]:
    """First and last + 1 of each stretch of ``read`` positions."""
    ends = [*(end for end in BINS if end < read), read]
    return list(zip([0, *ends[:-1]], ends))


def _compare(full: Tensor, logits: Tensor, following: Tensor) -> Tensor:
    """Logits ``[B, V]`` of full and the strategy, what follows ``[B]`` -> the metrics ``[3, B]``."""
    reference, own = (x.double().log_softmax(-1) for x in (full, logits))
    same = own.argmax(-1) == reference.argmax(-1)
    nll = -own.gather(-1, following.unsqueeze(1)).squeeze(1)
    return torch.stack([divergence(reference, own), same.double(), nll]).cpu()
