"""All that a record says of quality, for many strategies at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.measure.record import REFERENCE, Figure, Quality, Realised
from kvatlas.quality.fidelity import Fidelity, fidelity
from kvatlas.quality.reading import Fractions, Progress, part_of
from kvatlas.quality.recall import CONVERSATIONS, Recall, recall
from kvatlas.quality.recall import TOKENS as CONVERSATION_TOKENS
from kvatlas.workload.text import Text, prompts

CONTEXT, CONTINUATION, WINDOWS = 2048, 128, 2
FIDELITY_SHARE = 0.6
"""Of the time, about; for the progress only."""


def measure_quality(
    lm: LM,
    specs: Sequence[str],
    text: Text,
    *,
    context: int = CONTEXT,
    continuation: int = CONTINUATION,
    windows: int = WINDOWS,
    conversations: int = CONVERSATIONS,
    conversation_tokens: int = CONVERSATION_TOKENS,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Quality]:
    """KL divergence, top-1 agreement and perplexity on real text, and recall of told facts, for each spec.

    Args:
        lm: in float32, with a tokenizer.
        text: the part that is scored; must not have calibrated the model.
        context: tokens before a continuation of ``continuation`` tokens, in each of ``windows`` places of the text.
        conversations: of about ``conversation_tokens`` tokens, drawn from ``seed``.

    Raises:
        UserError: no tokenizer, a text that is too short.
    """
    if lm.tokenizer is None:
        raise UserError("quality is measured on text, and this model has no tokenizer")
    texts = prompts(lm.tokenizer, text, windows, context, continuation)
    near = fidelity(lm, specs, texts, part_of(progress, 0.0, FIDELITY_SHARE, "continuation"))
    part = part_of(progress, FIDELITY_SHARE, 1 - FIDELITY_SHARE, "recall")
    told = recall(lm, specs, conversations, conversation_tokens, seed, part)
    dtype = str(lm.facts.dtype).removeprefix("torch.")
    return {spec: quality(near[spec], told[spec], dtype, text.sha256, context) for spec in near}


def quality(near: Fidelity, told: Recall, dtype: str, sha256: str, context: int) -> Quality:
    """The record's part."""
    return Quality(
        reference=REFERENCE,
        dtype=dtype,
        text_sha256=sha256,
        context_tokens=context,
        question="after",
        turns="one-prefill",
        perplexity=near.perplexity(),
        kl=near.divergence(),
        top1=near.agreement(),
        recall=told.figure(),
        realised=realised(near.fractions),
    )


def realised(fractions: Fractions) -> Realised:
    """Median over the steps looked at, with the smallest and the largest."""
    return Realised(kept=Figure.of(fractions.kept, "share"), read=Figure.of(fractions.read, "share"))
