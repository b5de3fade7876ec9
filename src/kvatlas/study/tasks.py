"""What a child process does: prepare a comparison, measure one strategy once, or measure the quality of all.

A job is plain JSON (``Plan.job``); so is every result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.measure.environment import environment
from kvatlas.measure.sample import Sample
from kvatlas.measure.schema import Model, Workload
from kvatlas.measure.system import Load, measure_system
from kvatlas.model.facts import ModelFacts, check_prompt
from kvatlas.model.load import LoadedModel, load_model
from kvatlas.strategy.spec import parse
from kvatlas.study.plan import NO_TEXT, text
from kvatlas.workload.text import Prompt, prompts, random_prompts

Job = dict[str, Any]
Progress = Callable[[float, str], None]
TRIAL_TOKENS = 48
"""Prompt length of the trial that finds out whether a strategy and the model go together."""


def prepare(job: Job, progress: Progress) -> Any:
    """All that can be found out before the first measurement: the model, the prompts, whether each strategy works.

    Raises:
        UserError: with what to change.
    """
    torch.set_num_threads(1)  # everything here is small
    progress(0.0, "loading the model")
    loaded, lm = model_of(job, job["dtype"])
    check_prompt(lm.facts, job["prompt_tokens"], job["new_tokens"], job["beyond_trained"])
    made = _prompts(job, loaded, lm.facts)
    if job["quality"]:
        _check_quality(job, loaded)
    progress(0.5, "trying every strategy")
    for written in job["strategies"]:
        _try(lm, written, [list(prompt.ids[:TRIAL_TOKENS]) for prompt in made[:2]])
    return {
        "prompts": [prompt.ids for prompt in made],
        "follow": list(zip(*(prompt.continuation for prompt in made))),
        "model": model_part(loaded, lm.facts).model_dump(),
        "environment": environment(job["device"]).model_dump(),
        "workload": _workload(job, loaded, lm.facts).model_dump(),
    }


def measure(job: Job, progress: Progress) -> Any:
    """One sample of one strategy."""
    torch.set_num_threads(job["threads"])
    began = time.perf_counter()
    loaded, lm = model_of(job, job["dtype"])
    load = Load(job["prompts"], job["follow"])
    measured = measure_system(lm, parse(job["strategy"]), load, loaded_in=time.perf_counter() - began)
    sample = Sample(
        status="ok",
        repeat=job["repeat"],
        order=job["order"],
        seconds=0.0,
        model=model_part(loaded, lm.facts),
        environment=environment(job["device"]),
        dtype=loaded.dtype,
        threads=job["threads"],
        native_kernel=_native(lm),
        measured=measured,
    )
    return sample.model_dump()


def quality(job: Job, progress: Progress) -> Any:
    """Quality of every strategy that lacks it: ``{written: Quality}``."""
    from kvatlas.quality.run import measure_quality

    torch.set_num_threads(job["threads"])
    progress(0.0, "loading the model")
    _, lm = model_of(job, job["quality_dtype"])
    found = measure_quality(
        lm,
        job["strategies"],
        text(job["text_file"]).split()[1],
        context=_context(job),
        seed=job["seed"],
        progress=lambda what, share: progress(share, what),
    )
    return {written: part.model_dump(mode="json") for written, part in found.items()}


def battery(job: Job, progress: Progress) -> Any:
    """Every cell of a battery that is missing."""
    from kvatlas.study.battery_task import battery

    return battery(job, progress)


TASKS: dict[str, Callable[[Job, Progress], Any]] = {
    "prepare": prepare, "measure": measure, "quality": quality, "battery": battery,
}  # fmt: skip


def model_of(job: Job, dtype: str) -> tuple[LoadedModel, LM]:
    loaded = load_model(job["model"], dtype, job["device"], job["load_format"], job["seed"])
    calibration = text(job["text_file"]).split()[0].text if loaded.tokenizer is not None else None
    return loaded, LM(loaded.model, loaded.tokenizer, calibration)


def _prompts(job: Job, loaded: LoadedModel, facts: ModelFacts) -> list[Prompt]:
    """The batch's prompts, all different, of the scored part of the text (random ids where there is no tokenizer)."""
    sizes = (job["batch"], job["prompt_tokens"], job["new_tokens"])
    if loaded.tokenizer is None:
        return random_prompts(facts.vocab, *sizes, seed=job["seed"])
    scored = text(job["text_file"]).split()[1]
    made = prompts(loaded.tokenizer, scored, *sizes, overlap=True)
    if len({prompt.ids for prompt in made}) < len(made):
        raise UserError(
            f"{scored.name} is too short for {job['batch']} different prompts of {job['prompt_tokens']} tokens; "
            "use a smaller --batch, a smaller --prompt-tokens, or a longer --text"
        )
    return made


def _context(job: Job) -> int:
    """Tokens before the continuation that is scored: as in the timed run, up to what scoring can afford."""
    from kvatlas.quality.run import CONTEXT

    return min(CONTEXT, job["prompt_tokens"])


def _check_quality(job: Job, loaded: LoadedModel) -> None:
    """Raise UserError where the text is too short to score."""
    from kvatlas.quality.run import CONTINUATION, WINDOWS

    if loaded.tokenizer is not None:
        scored = text(job["text_file"]).split()[1]
        try:
            prompts(loaded.tokenizer, scored, WINDOWS, _context(job), CONTINUATION)
        except UserError as error:
            raise UserError(f"for quality, {error} (or --no-quality)") from error


def _try(lm: LM, written: str, some: list[list[int]]) -> None:
    """A prefill and two steps, on nearly nothing. Only what the user can change stops the study here."""
    strategy = parse(written)
    trial = LM(lm.model, None, lean=False) if strategy.calibrates else lm
    try:
        cache = trial.new_cache(strategy)
        logits = trial.prefill(cache, some, reserve=2)
        for _ in range(2):
            logits = trial.step(cache, logits.argmax(-1))
    except UserError as error:
        raise UserError(f"{written}: {error}" if written not in str(error) else str(error)) from error
    except Exception:  # not the user's: the run itself will record it
        return


def _workload(job: Job, loaded: LoadedModel, facts: ModelFacts) -> Workload:
    """Whether the words are a text's or made up, and whether the model was trained at such lengths."""
    limit = facts.max_positions
    given = text(job["text_file"])
    real = loaded.tokenizer is not None
    return Workload(
        text=given.name if real else NO_TEXT,
        text_sha256=given.sha256 if real else "",
        calibration_sha256=given.split()[0].sha256 if real else None,
        beyond_trained=limit is not None and job["prompt_tokens"] + job["new_tokens"] > limit,
        **{name: job[name] for name in ("prompt_tokens", "new_tokens", "batch", "seed")},
    )


def model_part(loaded: LoadedModel, facts: ModelFacts) -> Model:
    return Model(
        name=loaded.name,
        source=loaded.source,
        weights=loaded.weights_id,
        architecture=facts.architecture,
        layers=facts.layers,
        query_heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        positions=facts.max_positions,
        parameters=sum(weight.numel() for weight in loaded.model.parameters()),
    )


def _native(lm: LM) -> bool:
    """Whether the compiled kernels were in use."""
    from kvatlas.attention import fast

    q = torch.zeros(1, lm.facts.heads, lm.facts.head_dim, dtype=lm.facts.dtype, device=lm.facts.device)
    return fast.serves(q, q.unsqueeze(2))
