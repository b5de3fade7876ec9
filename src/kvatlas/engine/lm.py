"""A model that generates under any strategy: prefill one sequence at a time, decode the batch at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvatlas.engine.cache import CacheShape, KVCache
from kvatlas.engine.calibrate import calibrate, calibrated, merged, text_ids
from kvatlas.engine.clock import Clock
from kvatlas.engine.sampling import Sampling
from kvatlas.errors import UserError
from kvatlas.model.bridge import AtlasCache, bridge_of
from kvatlas.model.facts import attentions_of, check_prompt, facts_of
from kvatlas.model.lean import LeanDecoder
from kvatlas.model.project import Projector
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import Strategy

if TYPE_CHECKING:
    from kvatlas.engine.session import Session


@dataclass(slots=True)
class Generation:
    """What one prompt gave. ``finish`` is ``stop`` (a stop token, left out of ``ids``) or ``length``."""

    text: str
    ids: list[int]
    prompt_tokens: int
    finish: str


class LM:
    """A transformers model, its tokenizer, and the engine.

    Args:
        model: any decoder that the bridge serves, in evaluation mode.
        tokenizer: None where prompts come as token ids.
        calibration: text for strategies that are calibrated once a model; must not be what is scored later.
        lean: use the lean decode forward where the model allows it.
    """

    def __init__(self, model: Any, tokenizer: Any = None, calibration: str | None = None, lean: bool = True) -> None:
        self.bridge = bridge_of(model)
        self.model, self.tokenizer, self.calibration = model, tokenizer, calibration
        self.facts = facts_of(model)
        self.port = Projector(model)
        self.lean = LeanDecoder(model) if lean and LeanDecoder.supports(model) else None
        self.shape = shape_of(model)
        self._constants: dict[Any, Any] = {}
        self._texts: dict[str, list[int]] = {}
        self.alive = WeakValueDictionary[Strategy, Any]()  # what its caches hold together, while one of them does

    def constants(self, strategy: Strategy) -> Any:
        """What the strategy's reader and encoder need once a model, a mapping for each layer; found at the first call.

        None where nothing has to be known.
        """
        answers = calibrated(strategy)
        if not answers:
            return None
        keys = tuple(answer.calibration() for answer in answers)
        for key, answer in zip(keys, answers):
            if (key,) not in self._constants:
                self._constants[(key,)] = calibrate(self, answer)
        if keys not in self._constants:
            self._constants[keys] = merged([self._constants[(key,)] for key in keys])
        return self._constants[keys]

    def new_cache(self, strategy: str | Strategy, clock: Clock | None = None) -> KVCache:
        """An empty cache under a strategy."""
        chosen = parse(strategy)
        return KVCache(chosen, self.shape, self.port, self.constants(chosen), clock, self.alive)

    @torch.no_grad()
    def prefill(self, cache: KVCache, prompts: Sequence[Sequence[int]], reserve: int) -> Tensor:
        """Begin ``cache`` with these prompts (token ids); returns the logits ``[B, V]`` that follow each."""
        cache.begin([len(p) for p in prompts], reserve)
        return torch.cat([self.extend(cache, row, ids) for row, ids in enumerate(prompts)])

    @torch.no_grad()
    def extend(self, cache: KVCache, row: int, ids: Sequence[int], final: bool = True) -> Tensor:
        """Append a run of tokens to one sequence (its prompt, or a later turn); returns logits ``[1, V]`` after it."""
        first = int(cache.seen[row])
        todo = list(ids)
        if first == 0:
            self._check_prompt(cache, todo)
            reused = cache.match_prefix(row, todo)
            todo, first = todo[reused:], reused
        size = cache.strategy.prefill.chunk or len(todo)
        cache.expect(row, len(todo))
        logits = None
        for start in range(0, len(todo), size):
            part = todo[start : start + size]
            last = final and start + size >= len(todo)
            logits = self._forward_run(cache, row, part, first + start, last)
        if first == 0 or len(todo) < len(ids):
            cache.finish_prefill(row, list(ids))
        assert logits is not None, "a run has at least one token"
        return logits

    def _check_prompt(self, cache: KVCache, ids: list[int]) -> None:
        """A reader that is calibrated on a text of its own may want prompts to begin with it."""
        text = cache.strategy.read.calibration_text()
        if text is None:
            return
        if text not in self._texts:
            self._texts[text] = text_ids(self, text)
        cache.strategy.read.check_prompt(ids, self._texts[text])

    def _forward_run(self, cache: KVCache, row: int, part: list[int], first: int, final: bool) -> Tensor:
        driver = AtlasCache(cache, self.facts.layers, rows=[row], seen=first)
        driver.final = final
        self.bridge.watch(driver)
        device = self.facts.device
        positions = torch.arange(first, first + len(part), device=device).unsqueeze(0)
        ids = torch.tensor([part], device=device)
        out = self.model(
            input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{cache_name(): driver}
        )
        return out.logits[:, -1]

    @torch.no_grad()
    def step(self, cache: KVCache, tokens: Tensor) -> Tensor:
        """Feed one token per sequence ``[B]``; returns the logits ``[B, V]`` after it."""
        positions = cache.seen.unsqueeze(1)
        if self.lean is None:
            driver = AtlasCache(cache, self.facts.layers, seen=1)
            self.bridge.watch(driver)
            inputs = {"input_ids": tokens.unsqueeze(1), "position_ids": positions, cache_name(): driver}
            return self.model(**inputs, use_cache=True).logits[:, -1]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
            if cache.foresees:
                cache.foresee(layer, x)
            if cache.wants_inputs:
                cache.inputs(layer, x[:, 0])
            return cache.step(layer, q[:, :, 0], k[:, :, 0], v[:, :, 0]).flatten(1).unsqueeze(1)

        return self.lean.forward(tokens.unsqueeze(1), positions, attend)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        strategy: str | Strategy = "full",
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
        beyond_trained: bool = False,
    ) -> list[Generation]:
        """Generate after each prompt under a strategy.

        Args:
            prompts: texts, or lists of token ids, of any lengths.
            strategy: a spec such as ``"h2o:0.3"``.
            temperature: 0 is greedy; above, sampled with ``top_p`` and ``seed``.
            stop: token ids that end a sequence; None: the model's own.

        Raises:
            UserError: an unknown strategy, an empty prompt, a prompt beyond the model's positions.
        """
        ids = self.encode_prompts(prompts)
        sampling = Sampling(temperature, top_p, seed)
        stops = set(self.stop_ids() if stop is None else stop)
        rows: list[list[int]] = [[] for _ in ids]
        for tokens in self.stream(ids, strategy, max_new_tokens, sampling, stops, beyond_trained):
            for row, token in zip(rows, tokens):
                row.append(token)
        out = []
        for prompt, row in zip(ids, rows):
            kept = [t for t in row if t >= 0]
            out.append(
                Generation(self.decode(kept), kept, len(prompt), "length" if len(kept) == max_new_tokens else "stop")
            )
        return out

    def stream(
        self,
        ids: Sequence[Sequence[int]],
        strategy: str | Strategy,
        max_new_tokens: int,
        sampling: Sampling,
        stops: set[int],
        beyond_trained: bool = False,
    ) -> Iterator[list[int]]:
        """One list of new tokens per step, one entry per sequence; -1 once a sequence has stopped."""
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        for prompt in ids:
            check_prompt(self.facts, len(prompt), max_new_tokens, beyond_trained)
        chosen = parse(strategy)
        cache = self.new_cache(chosen)
        draws = sampling.draws(len(ids), max_new_tokens, self.facts.device)
        ends = torch.tensor(sorted(stops) or [-1], device=self.facts.device)
        done = torch.zeros(len(ids), dtype=torch.bool, device=self.facts.device)
        logits = self.prefill(cache, ids, reserve=max_new_tokens)
        for i in range(max_new_tokens):
            tokens = sampling.choose(logits, None if draws is None else draws[:, i])
            done |= torch.isin(tokens, ends)
            yield tokens.masked_fill(done, -1).tolist()
            if i + 1 == max_new_tokens or bool(done.all()):
                return
            logits = self.step(cache, tokens)

    def session(
        self, strategy: str | Strategy = "full", *, system: str | None = None, beyond_trained: bool = False
    ) -> Session:
        """A conversation with one cache: append turns, generate answers, fork it, save it.

        Args:
            strategy: a spec such as ``"h2o:0.3"``; its budget is of the first turn.
            system: a system message for turns in the chat template.
            beyond_trained: let it pass the model's trained positions.
        """
        from kvatlas.engine.session import Session

        return Session(self, self.new_cache(strategy), system, beyond_trained)

    # -------------------------------------------------------------- tokenizer

    def encode_prompts(self, prompts: str | Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
        """Texts to token ids; ids pass through. Raises UserError for an empty prompt, or text without a tokenizer."""
        if not isinstance(prompts, Iterable):
            raise UserError(f"prompts must be texts or lists of token ids, not {type(prompts).__name__}")
        items: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if not items:
            raise UserError("no prompt given")
        return [self._ids(item, f"prompt {i + 1}") for i, item in enumerate(items)]

    def _ids(self, item: Any, name: str) -> list[int]:
        if isinstance(item, str):
            if self.tokenizer is None:
                raise UserError("this model has no tokenizer; give prompts as lists of token ids")
            item = self.tokenizer(item)["input_ids"] if item.strip() else []
        if not hasattr(item, "__len__"):
            raise UserError(f"{name} must be text or a list of token ids, not {type(item).__name__}")
        if not len(item):
            raise UserError(f"{name} is empty")
        ids = [int(token) for token in item]
        strange = next((token for token in ids if not 0 <= token < self.facts.vocab), None)
        if strange is not None:
            raise UserError(f"{name} has token {strange}; the model's tokens are 0 to {self.facts.vocab - 1}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, or an empty string without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=True)

    def stop_ids(self) -> list[int]:
        """The model's own end tokens."""
        found = getattr(self.model, "generation_config", None)
        eos = found.eos_token_id if found is not None else None
        if eos is None and self.tokenizer is not None:
            eos = self.tokenizer.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def shape_of(model: Any) -> CacheShape:
    """A cache's view of a model."""
    facts = facts_of(model)
    sinks = tuple(getattr(m, "sinks", None) for m in attentions_of(model))
    return CacheShape(
        facts.layers, facts.heads, facts.kv_heads, facts.head_dim, facts.windows, facts.scales, sinks, facts.dtype,
        facts.device, facts.hidden,
    )  # fmt: skip


def cache_name() -> str:
    """The argument that transformers' models take a cache by: it was renamed in 5.2x."""
    import inspect

    from transformers import LlamaForCausalLM

    return "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
