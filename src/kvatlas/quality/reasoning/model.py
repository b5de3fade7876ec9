"""``kvatlas`` as a model of lm-eval's: whatever lm-eval asks is answered through a compressed cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.model.load import load_model
from kvatlas.quality.asking import ask
from kvatlas.quality.question import Question, Reply
from kvatlas.quality.reading import Progress
from kvatlas.quality.reasoning.extra import need_lm_eval
from kvatlas.quality.reasoning.requests import Pair, Share, scores, shares
from kvatlas.strategy.spec import parse
from kvatlas.workload.text import default_text

need_lm_eval()
from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402
from tqdm import tqdm  # noqa: E402

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

NEW_TOKENS = 256  # as lm-eval's own models write where a task does not say


@register_model("kvatlas")
class KVAtlasLM(TemplateLM):
    """A model under a strategy.

    A request's context but its last token is prefilled and compressed; that token and the continuation are read through
    the cache. Requests of one sample share a prefilled context.

    Args:
        pretrained: ``smollm2``, a local folder or a hub id, or an `LM`.
        strategy: a spec such as ``h2o:0.3``. One with commas must be given in lm-eval's JSON form:
            ``--model_args '{"pretrained": "smollm2", "strategy": "h2o:0.3,sinks=4"}'``.
        dtype: ``float32``, ``bfloat16`` or ``auto``.
        device: ``cpu``, ``cuda`` or ``cuda:N``; the CPU where there is no such device, as lm-eval asks for ``cuda:0``
            unless told otherwise.
        load_format: ``dummy`` for random weights drawn from ``seed``.
        batch_size, max_batch_size: lm-eval gives them; memory decides here, and the scores do not depend on them.

    Raises:
        UserError: an unknown strategy or argument, a model that cannot be served, a model without a tokenizer.
    """

    def __init__(
        self,
        pretrained: str | LM = "smollm2",
        strategy: str = "full",
        dtype: str = "auto",
        device: str | None = None,
        load_format: str = "auto",
        seed: int = 0,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise UserError(
                f"the model 'kvatlas' takes no argument {', '.join(sorted(unknown))}; a strategy with commas must be "
                """given as JSON: --model_args '{"strategy": "h2o:0.3,sinks=4"}'"""
            )
        self.strategy = strategy
        parse(strategy)
        self.lm = pretrained if isinstance(pretrained, LM) else _load(pretrained, dtype, device, load_format, seed)
        self._device = self.lm.facts.device
        if self.lm.tokenizer is None:
            raise UserError("lm-eval's requests are texts, and this model has no tokenizer")
        self.tokenizer = self.lm.tokenizer

    # ---------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """The model's positions."""
        return self.lm.facts.max_positions or 2048

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; None: with the special tokens that the tokenizer adds by itself, a BOS never twice."""
        if add_special_tokens is None and self.tokenizer.bos_token and string.startswith(self.tokenizer.bos_token):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special)

    def pair(self, context: str, continuation: str) -> Pair:
        """A request's tokens, split as lm-eval splits them, cut from the left to the model's positions.

        Raises:
            UserError: a context of fewer than 2 tokens (there is nothing to compress), an empty continuation.
        """
        if context:
            before, after = self._encode_pair(context, continuation)
        else:
            before, after = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
        if not after:
            raise UserError(f"there is nothing to score in {continuation!r} after {context[-40:]!r}")
        before = before[-max(2, self.max_length - len(after)) :]
        if len(before) < 2:
            raise UserError(
                f"{continuation[:40]!r} comes after a context of {len(before)} token: nothing to compress; "
                "tasks that score a text without a context cannot be run under a strategy"
            )
        return Pair(tuple(before), tuple(after))

    # --------------------------------------------------------------------- requests

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation and whether it is the greedy one; see the class."""
        pairs = [self.pair(*request.args) for request in requests]
        samples: dict[Any, list[int]] = {}
        for i, request in enumerate(requests):
            known = request.doc_id is not None
            samples.setdefault((request.task_name, request.doc_id) if known else pairs[i].context, []).append(i)
        found = self._scored(pairs, list(samples.values()), disable_tqdm)
        for request, score in zip(requests, found):
            self.cache_hook.add_partial("loglikelihood", request.args, score)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [Pair(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        samples: dict[Any, list[int]] = {}
        for i, pair in enumerate(pairs):
            samples.setdefault(pair.context, []).append(i)
        return self._scored(pairs, list(samples.values()), disable_tqdm)

    def _scored(self, pairs: Sequence[Pair], samples: list[list[int]], silent: bool) -> list[tuple[float, bool]]:
        asked: list[list[Share]] = [shares(str(k), [pairs[i] for i in sample]) for k, sample in enumerate(samples)]
        replies = iter(self._ask([share.question for own in asked for share in own], "Scoring", silent))
        found: dict[int, tuple[float, bool]] = {}
        for own, sample in zip(asked, samples):
            found.update(zip(sample, scores([(share, next(replies)) for share in own])))
        return [found[i] for i in range(len(pairs))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refused: a text that is scored from its first token on has no context, so there is nothing to compress.

        Raises:
            UserError: always; it names what measures perplexity under a strategy.
        """
        raise UserError(
            "a rolling log-likelihood scores a text from its first token on, so no strategy would have compressed "
            "anything; `kvatlas quality` has perplexity after a compressed context"
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy text after each context, up to a stop sequence, a stop token, or ``max_gen_toks``.

        Raises:
            UserError: a task that samples, a context of fewer than 2 tokens.
        """
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_wanted(request.args[1]), []).append(i)
        found: dict[int, str] = {}
        for (new, *until), numbers in groups.items():
            questions = [self._writing(str(i), requests[i].args[0], new) for i in numbers]
            replies = self._ask(questions, "Generating", disable_tqdm, partial(self._has, until))
            for i, reply in zip(numbers, replies):
                found[i] = _cut(self.lm.decode(reply.written), until)
                self.cache_hook.add_partial("generate_until", requests[i].args, found[i])
        return [found[i] for i in range(len(requests))]

    def _writing(self, name: str, context: str, new: int) -> Question:
        if new >= self.max_length - 1:
            raise UserError(f"{new} new tokens leave no room for a context in the model's {self.max_length} positions")
        ids = self.tok_encode(context)[-(self.max_length - new) :]
        return Question(name, tuple(ids), write=new)

    def _has(self, until: Sequence[str], ids: Sequence[int]) -> bool:
        text = self.lm.decode(ids) if until else ""
        return any(stop in text for stop in until)

    def _ask(
        self, questions: list[Question], what: str, silent: bool, ended: Callable[[Sequence[int]], bool] | None = None
    ) -> list[Reply]:
        with tqdm(total=100, desc=f"{what} {len(questions)} questions", unit="%", disable=silent) as bar:
            told: Progress = lambda _, share: bar.update(int(100 * share) - bar.n)  # noqa: E731
            replies = ask(self.lm, [self.strategy], questions, told, ended=ended)[self.strategy]
            bar.update(100 - bar.n)
        return replies

    # ------------------------------------------------------------------------- chat

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as the model's chat template has them."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def get_model_info(self) -> dict[str, str]:
        """What lm-eval writes beside its results."""
        return {"strategy": parse(self.strategy).name, "model_dtype": str(self.lm.facts.dtype)}


def _load(name: str, dtype: str, device: str | None, load_format: str, seed: int) -> LM:
    import torch

    if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
        device = "cpu"
    loaded = load_model(name, dtype, device, load_format, seed)
    return LM(loaded.model, loaded.tokenizer, default_text().split()[0].text)


def _wanted(options: dict[str, Any]) -> tuple[Any, ...]:
    """New tokens and stop sequences of a generation request. Raises UserError where it samples."""
    if options.get("do_sample") and options.get("temperature", 1.0) != 0:
        raise UserError("the model 'kvatlas' writes greedily; run the task with --gen_kwargs do_sample=false")
    until = options.get("until") or []
    new = int(options.get("max_gen_toks") or options.get("max_new_tokens") or NEW_TOKENS)
    return new, *([until] if isinstance(until, str) else [stop for stop in until if stop])


def _cut(text: str, until: Sequence[str]) -> str:
    for stop in until:
        text = text.split(stop)[0]
    return text
