"""The commands: fast help, one clear line for bad input and nothing left behind, streaming, the list of strategies."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from folders import SMALL, VOCAB, apart, byte_tokenizer, command, here, save, text_file, tiny_folder
from transformers import AutoConfig, AutoModelForCausalLM

import kvatlas
from kvatlas.cli.generate import Words, encoded
from kvatlas.cli.main import compare
from kvatlas.engine.lm import LM
from kvatlas.model.load import load_model
from kvatlas.strategy.registry import presets
from kvatlas.study import child, tasks
from kvatlas.study.plan import DEFAULTS

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command in this process, its tasks too."""
    monkeypatch.setattr(child.Workers, "run", lambda self, task, job, *_: tasks.TASKS[task](job, lambda *_: None))
    return here(capfd, monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose positions are a learned table."""
    return tiny_folder(tmp_path_factory.mktemp("models") / "opt", "opt")


@pytest.fixture(scope="module")
def alibi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the bridge cannot serve."""
    config = AutoConfig.for_model("bloom", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2)
    return save(tmp_path_factory.mktemp("models") / "bloom", AutoModelForCausalLM.from_config(config))


# Start


def test_help_is_fast():
    times = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run(command("--help"), capture_output=True, text=True, timeout=60)
        times.append(time.perf_counter() - began)
        assert done.returncode == 0 and all(name in done.stdout for name in ("compare", "generate", "strategies"))
    assert min(times) < 1.5, times  # 0.25 s on an idle machine


def test_import_is_light():
    heavy = "{'torch', 'transformers', 'numpy', 'pydantic', 'rich.console'}"
    code = f"import kvatlas.cli.main, sys; found = {heavy} & {{*sys.modules}}; sys.exit(str(found) if found else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version(cli: Cli):
    assert cli("--version") == (0, f"kvatlas {kvatlas.__version__}\n", "")


def test_the_package_offers_what_it_says():
    assert set(kvatlas.__all__) <= set(dir(kvatlas))
    assert all(getattr(kvatlas, name) is not None for name in kvatlas.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvatlas.nothing


def test_default_strategies_are_the_plan_s():
    assert compare.__defaults__ is not None and DEFAULTS in compare.__defaults__


# Bad input

COMPARE_BAD = {
    "unknown strategy": (["--strategies", "h3o:0.3"], "did you mean 'h2o'?"),
    "unknown parameter": (["--strategies", "h2o:recnt=3,heavy=2"], "did you mean 'recent'?"),
    "budget 0": (["--strategies", "h2o:0"], "must be above 0"),
    "negative budget": (["--strategies", "full,h2o:-0.3"], "must be above 0"),
    "budget above 1 and not whole": (["--strategies", "h2o:1.5"], "not whole"),
    "two answers": (["--strategies", "h2o:0.3+streaming:0.3"], "both answer 'keep'"),
    "no strategies": (["--strategies", " , "], "no strategies"),
    "twice": (["--strategies", "h2o:0.3,h2o:0.30"], "twice"),
    "prompt of nothing": (["--prompt-tokens", "0"], "--prompt-tokens must be 1 or more"),
    "no new tokens": (["--new-tokens", "0"], "--new-tokens must be 1 or more"),
    "no batch": (["--batch", "-1"], "--batch must be 1 or more"),
    "no repeats": (["--repeats", "0"], "--repeats must be 1 or more"),
    "no threads": (["--threads", "0"], "--threads must be 1 or more"),
    "dtype": (["--dtype", "float8"], "--dtype must be"),
    "load format": (["--load-format", "gguf"], "--load-format must be"),
    "device": (["--device", "tpu"], "use cpu, cuda or cuda:N"),
    "no text": (["--text", "no-such-file.txt"], "no file no-such-file.txt"),
    "text is a folder": (["--text", "."], "is a folder"),
    "too long": (["--prompt-tokens", "2045"], "--beyond-trained"),
    "model": (["--model", "smollm3"], "did you mean 'smollm2'?"),
    "folder without a model": (["--model", "."], "has no config.json"),
    "no number": (["--batch", "many"], "--batch"),
    "unknown option": (["--bach", "4"], "--bach"),
    "json in no folder": (["--json", "no/such/folder/x.json"], "there is no folder"),
}


@pytest.mark.parametrize("what", COMPARE_BAD)
def test_compare_says_what_is_wrong(what: str, cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options, words = COMPARE_BAD[what]
    code, out, err = cli("compare", "--model", model, *SMALL, "--out", "results/here", *options)
    refused(code, out, err, words)
    assert not list(tmp_path.iterdir()), "something was left behind"


@pytest.mark.parametrize(
    ("which", "spec", "words"), [("learned", "streaming:0.3", "learned"), ("alibi", "full", "BloomForCausalLM")]
)
def test_compare_refuses_what_the_model_cannot(
    which: str, spec: str, words: str, cli: Cli, tmp_path: Path, request: pytest.FixtureRequest
):
    folder = request.getfixturevalue(which)
    refused(*cli("compare", "--model", folder, *SMALL, "--strategies", spec, "--out", tmp_path / "out"), words)
    assert not (tmp_path / "out").exists()


def test_compare_refuses_an_out_that_is_no_folder(cli: Cli, model: Path, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        refused(*cli("compare", "--model", model, *SMALL, "--out", tmp_path / out), "give a folder")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc, where nobody can write")
def test_compare_refuses_an_out_that_cannot_be_written(cli: Cli, model: Path):
    refused(*cli("compare", "--model", model, *SMALL, "--out", "/proc/kvatlas"), "cannot be written")


def test_compare_refuses_a_text_without_words(cli: Cli, model: Path, tmp_path: Path):
    for content, words in (
        (b"  \n", "is empty"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"A few words.\nNo more.\n", "tokens"),
    ):
        (tmp_path / "text").write_bytes(content)
        result = cli("compare", "--model", model, *SMALL, "--text", tmp_path / "text", "--out", tmp_path / "out")
        refused(*result, words)
    (tmp_path / "text").write_text(
        "Some words, and a few more of them in one line, which is all there is to read.\nAnd this.\n"
    )
    options = ("--text", tmp_path / "text", "--out", tmp_path / "out", "--no-quality", "--batch", "60")
    refused(*cli("compare", "--model", model, *SMALL, *options), "too short for 60 different prompts")
    assert not (tmp_path / "out").exists()


GENERATE_BAD = {
    "empty": (["  "], "the prompt is empty"),
    "strategy": (["Hi", "--strategy", "h20:0.3"], "did you mean 'h2o'?"),
    "temperature": (["Hi", "--temperature", "-1"], "temperature must be"),
    "top p": (["Hi", "--top-p", "0"], "top_p must be"),
    "length": (["Hi", "--max-new-tokens", "0"], "--max-new-tokens must be 1 or more"),
    "too long": (["Hi", "--max-new-tokens", "2048"], "--beyond-trained"),
    "no template": (["Hi", "--chat"], "no chat template"),
    "no words": (["Hi", "--model", "llama-3.2-1b", "--load-format", "dumy"], "did you mean 'dummy'?"),
    "model": (["Hi", "--model", "nobody/nothing"], "is no folder here"),
    "no prompt": ([], "kvatlas generate --help"),
}


@pytest.mark.parametrize("what", GENERATE_BAD)
def test_generate_says_what_is_wrong(what: str, cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    options, words = GENERATE_BAD[what]
    refused(*cli("generate", "--model", model, *options), words)


def test_report_says_what_is_wrong(cli: Cli, tmp_path: Path):
    refused(*cli("report", tmp_path / "nowhere"), "cannot read records")
    refused(*cli("report", tmp_path), "has no records")


def test_a_fault_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError("on\nfire")

    monkeypatch.setattr("kvatlas.cli.strategies.show", broken)
    code, _, err = cli("strategies")
    assert code == 1 and err.startswith("error: RuntimeError: on fire") and err.count("\n") == 1


def test_bad_input_of_a_real_process(tmp_path: Path):
    done = apart("compare", "--strategies", "ful", "--out", tmp_path / "out")
    refused(done.returncode, done.stdout, done.stderr, "did you mean 'full'?")


def refused(code: int, out: str, err: str, words: str) -> None:
    """Exit code 2, one clear line as the last, no traceback."""
    assert code == 2 and not out, (code, out, err)
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err, err


# Generate


def test_generate_streams_what_the_engine_says(cli: Cli, model: Path):
    loaded = load_model(str(model))
    want = LM(loaded.model, loaded.tokenizer).generate("Once upon", "h2o:0.5", max_new_tokens=12)[0].text
    options = ("--model", model, "--strategy", "h2o:0.5", "-n", "12", "--dtype", "float32")
    code, out, err = cli("generate", "Once upon", *options, "--stats")
    assert (code, out) == (0, want + "\n")
    assert "h2o:0.5: 9 prompt tokens, 12 new" in err and "KV" in err


def test_generate_samples_by_seed(cli: Cli, model: Path):
    def said(seed: int) -> str:
        options = ("--temperature", "1.5", "--top-p", "0.9", "--seed", seed, "-n", "20", "--dtype", "float32")
        return cli("generate", "Once", "--model", model, *options)[1]

    assert said(1) == said(1) != said(2)


def test_generate_reads_a_prompt_from_stdin(model: Path):
    done = apart("generate", "-", "--model", model, "-n", "3", input="From a pipe")
    assert done.returncode == 0 and done.stdout.endswith("\n")


def test_words_come_whole():
    tokenizer = byte_tokenizer()
    text = "Grüße, 世界 🙂 — naïve"
    words = Words(tokenizer)
    pieces = [words.add(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) + words.rest() == text
    assert not any("\ufffd" in piece for piece in pieces) and len([p for p in pieces if p]) == len(text)


def test_words_that_end_in_the_middle_of_a_character():
    tokenizer = byte_tokenizer()
    words = Words(tokenizer)
    pieces = [words.add(token) for token in tokenizer("a🙂")["input_ids"][:3]]
    assert pieces == ["a", "", ""] and words.rest() == "\ufffd"


def test_chat_template_is_used_where_there_is_one():
    tokenizer = byte_tokenizer()
    plain = encoded(tokenizer, "Hi", None)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert (
        tokenizer.decode(encoded(tokenizer, "Hi", None)) == tokenizer.decode(encoded(tokenizer, "Hi", True)) == "[Hi]>"
    )
    assert encoded(tokenizer, "Hi", False) == plain


# Strategies


def test_strategies_tell_every_preset(cli: Cli):
    code, out, _ = cli("strategies")
    assert code == 0
    for name, preset in presets().items():
        assert f"{name} - " in out or f"{name}[:BUDGET of " in out
        assert preset.summary in out and all(key in out for key in preset.parameters())


def test_strategies_as_json(cli: Cli):
    told = {fact["name"]: fact for fact in json.loads(cli("strategies", "--json")[1])}
    assert set(told) == set(presets())
    assert all(set(fact["answers"]) == {"keep", "read", "place", "encode"} for fact in told.values())
    assert told["h2o"]["answered"] == ["keep"] and told["full"]["lossless"]
    one = json.loads(cli("strategies", "h2o:0.3", "--json")[1])
    assert [fact["name"] for fact in one] == ["h2o:0.3"] and not one[0]["lossless"]
    refused(*cli("strategies", "h3o"), "did you mean 'h2o'?")


# Python


def test_load_and_generate(model: Path):
    lm = kvatlas.load(str(model))
    answers = lm.generate(["One", "Another prompt"], strategy="h2o:0.5", max_new_tokens=4)
    assert [len(answer.ids) for answer in answers] == [4, 4]
    assert lm.calibration and lm.facts.dtype is torch.float32


def test_text_files_of_the_tests_are_long_enough(tmp_path: Path):
    assert text_file(tmp_path / "text.txt").stat().st_size > 40_000
