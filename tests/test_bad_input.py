"""What the Python interface is given wrongly: one clear line, a UserError, and nothing broken afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specs import lm_of, prompts, tokens
from tiny import POSITIONS, tiny_model

import kvatlas
from kvatlas.engine.lm import LM
from kvatlas.engine.replay import replay
from kvatlas.errors import UserError, nearest

Q, K = torch.randn(4, 20, 16), torch.randn(2, 20, 16)


def generate(*args: Any, arch: str = "llama", **kwargs: Any) -> Callable[[], Any]:
    return lambda: lm_of(arch).generate(*args, **kwargs)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown strategy": (generate(prompts(9), "h2p:0.3"), "did you mean 'h2o'"),
    "unknown parameter": (generate(prompts(9), "h2o:0.3,sink=3"), "did you mean 'sinks'"),
    "budget 0": (generate(prompts(9), "h2o:0"), "above 0"),
    "budget below 0": (generate(prompts(9), "h2o:-0.3"), "above 0"),
    "budget above 1, not whole": (generate(prompts(9), "h2o:1.5"), "not whole"),
    "two answers": (generate(prompts(9), "h2o:0.3+streaming:0.3"), "both answer 'keep'"),
    "temperature not a number": (generate(prompts(9), "full", temperature=float("nan")), "temperature"),
    "a number for a prompt": (generate([3], "full"), "must be text or a list"),
    "nothing after the colon": (generate(prompts(9), "h2o:"), "after the colon"),
    "no prompt": (generate([], "full"), "no prompt"),
    "empty prompt": (generate([[3, 4], []], "full"), "prompt 2 is empty"),
    "empty text": (generate("", "full"), "tokenizer|empty"),
    "text without a tokenizer": (generate("hello", "full"), "no tokenizer"),
    "no new tokens": (generate(prompts(9), "full", max_new_tokens=0), "max_new_tokens must be at least 1"),
    "temperature below 0": (generate(prompts(9), "full", temperature=-1.0), "temperature must be 0"),
    "top_p 0": (generate(prompts(9), "full", top_p=0.0), "top_p must be above 0"),
    "top_p above 1": (generate(prompts(9), "full", top_p=1.1), "at most 1"),
    "a prompt beyond the positions": (generate(prompts(POSITIONS + 1), "full"), "--beyond-trained"),
    "an answer beyond the positions": (generate(prompts(POSITIONS - 5), "full", max_new_tokens=6), "--beyond-trained"),
    "beyond a learned table": (
        generate(prompts(POSITIONS - 5), "full", arch="opt", max_new_tokens=6, beyond_trained=True),
        "learned table",
    ),
    "streaming with learned positions": (generate(prompts(30), "streaming:0.3", arch="opt"), "cannot be rotated.*RoPE"),
    "a token id beyond the vocabulary": (generate([[3, 4, 10_000]], "full"), "prompt 1 has token 10000.*0 to 255"),
    "a negative token id": (generate([[3, -4]], "full"), "prompt 1 has token -4.*0 to 255"),
    "replay: shapes": (lambda: replay("full", Q, K, K[:, :, :8], 10), r"Hq a multiple of H"),
    "replay: heads": (lambda: replay("full", Q[:3], K, K, 10), r"Hq a multiple of H"),
    "replay: dimensions": (lambda: replay("full", Q[None], K, K, 10), r"Hq a multiple of H"),
    "replay: whole numbers": (lambda: replay("full", Q.long(), K.long(), K.long(), 10), "one floating dtype"),
    "replay: dtypes": (lambda: replay("full", Q.double(), K, K, 10), "one floating dtype"),
    "replay: prompt_len 0": (lambda: replay("full", Q, K, K, 0), "prompt_len must be 1 to 20"),
    "replay: prompt_len too long": (lambda: replay("full", Q, K, K, 21), "prompt_len must be 1 to 20"),
    "replay: no hidden": (lambda: replay("infinigen:0.3", Q, K, K, 10), "pass hidden="),
    "replay: hidden too short": (
        lambda: replay("infinigen:0.3", Q, K, K, 10, hidden=torch.randn(5, 8), w_q=torch.randn(64, 8)),
        "hidden=",
    ),
    "replay: w_q of another size": (
        lambda: replay("infinigen:0.3", Q, K, K, 10, hidden=torch.randn(20, 8), w_q=torch.randn(32, 8)),
        "w_q=",
    ),
    "replay: no rope": (lambda: replay("streaming:6", Q, K, K, 10), "pass rope="),
    "load: no such folder": (lambda: kvatlas.load("./not/here"), "no folder"),
    "load: unknown dtype": (lambda: kvatlas.load("smollm2", dtype="float8"), "dtype 'float8' is unknown"),
    "load: unknown device": (lambda: kvatlas.load("smollm2", device="abacus"), "device 'abacus'"),
    "load: unknown dummy": (lambda: kvatlas.load("lama", load_format="dummy"), "lama"),
    "cache: unknown strategy": (lambda: kvatlas.cache("ful", lm_of("llama").model), "did you mean 'full'"),
    "cache: no model": (lambda: kvatlas.cache("full", "smollm2"), "transformers model"),
    "cache: reserve 0": (lambda: kvatlas.cache("full", lm_of("llama").model, reserve=0), "reserve must be at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_clear_line(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value) and 10 < len(str(caught.value)) < 400


@pytest.mark.parametrize("wrong", ["streaming:0.3", "nothing", "h2o:0"])
def test_a_model_works_on_after_an_error(wrong: str) -> None:
    lm = lm_of("opt")
    before = tokens(lm, prompts(20), "h2o:0.3")
    with pytest.raises(UserError):
        lm.generate(prompts(20), wrong)
    assert tokens(lm, prompts(20), "h2o:0.3") == before


def test_beyond_the_trained_positions_if_asked() -> None:
    lm = LM(tiny_model("llama", max_position_embeddings=32))
    made = lm.generate(prompts(40), "full", max_new_tokens=5, beyond_trained=True)
    assert len(made[0].ids) == 5
    assert len(lm.generate(prompts(27), "full", max_new_tokens=5)[0].ids) == 5, "just within"


def test_a_strategy_that_needs_calibration_says_so() -> None:
    from kvatlas.engine.cache import KVCache
    from kvatlas.strategy.spec import parse

    lm = lm_of("llama")
    with pytest.raises(UserError, match="must be calibrated"):
        KVCache(parse("infinigen:0.3"), lm.shape, lm.port)


def test_nearest_names() -> None:
    assert nearest("h20", ["h2o", "full"]) == "did you mean 'h2o'?"
    assert nearest("zzz", ["h2o", "full"]) == "choose from: full, h2o"
