"""Reading the clusters of a context: scores, one threshold, what is read; a fixed context, clustered once and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from folders import byte_tokenizer
from readers import DIM, GROUP, HEADS, check_forks_part, themed
from specs import lm_of, prompts, tokens
from test_matrix import RAGGED, ran, reachable
from test_stores import started
from tiny import tiny_model

import kvatlas
from kvatlas.engine import calibrate as calibration
from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.strategy.budget import resolve
from kvatlas.strategy.read.squeezed import Squeezed, group_keys, quantile, shares
from kvatlas.strategy.spec import parse
from kvatlas.strategy.view import LayerFacts, fold

SMALL = "squeezed:clusters=0.3,recent=4"


# -------------------------------------------------------------------------- functions


def test_shares_follow_the_formula() -> None:
    q, c = torch.randn(2, HEADS, GROUP, DIM), torch.randn(2, HEADS, 5, DIM)
    sizes = torch.randint(0, 4, (2, HEADS, 5))
    sizes[..., 0], sizes[..., 1] = 3, 0
    found = shares(q, c, sizes, 0.25)
    for b in range(2):
        for h in range(HEADS):
            e = (q[b, h] @ c[b, h].T * 0.25).exp()
            want = e / (e * sizes[b, h]).sum(-1, keepdim=True) * (sizes[b, h] > 0)
            torch.testing.assert_close(found[b, h], want)
    torch.testing.assert_close((found * sizes.unsqueeze(2)).sum(-1), torch.ones(2, HEADS, GROUP))
    assert torch.equal(shares(q, c, torch.zeros_like(sizes), 0.25), torch.zeros(2, HEADS, GROUP, 5))


def test_clusters_are_by_angle_and_their_centroids_means_of_raw_keys() -> None:
    """Keys of very different lengths, of six directions."""
    directions = torch.nn.functional.normalize(torch.randn(HEADS, 6, DIM), dim=-1)
    of = torch.arange(120) % 6
    keys = directions[:, of] * torch.rand(HEADS, 120, 1).add(0.1).mul(30) + torch.randn(HEADS, 120, DIM) * 0.01
    labels, found, centroids, sizes = group_keys(keys, 6, iterations=25, seed=0)
    assert sizes.tolist() == [[20] * 6] * HEADS
    for h in range(HEADS):
        assert len({(int(a), int(b)) for a, b in zip(labels[h], of)}) == 6
        for i in range(6):
            torch.testing.assert_close(centroids[h, i], keys[h, labels[h] == i].mean(0))
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(HEADS, 6))


@pytest.mark.parametrize(("share", "want"), [(0.0, -1.0), (0.05, 0.0), (0.5, 4.0), (0.9, 8.0), (0.99, 8.0)])
def test_the_quantile_is_a_value_that_so_many_reach(share: float, want: float) -> None:
    values = torch.arange(10.0)[torch.randperm(10)]
    assert float(quantile(values, share)) == want
    assert float(quantile(values[:0], share)) == -1.0


# ------------------------------------------------------------------------ what is read


def model_threshold(cache: object, rule: Squeezed, row: int) -> float:
    """The threshold of one sequence, from its states by the definition."""
    found = []
    for layer in cache.layers:  # type: ignore[attr-defined]
        state = {name: tensor[row] for name, tensor in layer.state.items()}
        length = int(state["length"])
        last = length - rule.clustered(length)
        q = state["queries"][:, -last:].view(layer.facts.kv_heads, -1, last, layer.facts.head_dim)
        for h in range(layer.facts.kv_heads):
            e = (q[h] @ state["centroids"][h].T).exp() * (state["sizes"][h] > 0)  # the queries are scaled
            s = (e / (e * state["sizes"][h]).sum(-1, keepdim=True)).mean(0)
            found.append(s[:, state["sizes"][h] > 0].flatten())
    ordered = torch.cat(found).sort().values
    return float(ordered[int(rule.quantile * len(ordered)) - 1])


def test_one_threshold_for_all_layers_by_the_last_queries() -> None:
    cache, _ = started(lm_of("llama"), f"{SMALL},quantile=0.7", prompts(*RAGGED))
    rule = cache.strategy.read
    assert isinstance(rule, Squeezed)
    for row, n in enumerate(RAGGED):
        thresholds = {float(layer.state["threshold"][row]) for layer in cache.layers}
        assert len(thresholds) == 1
        assert thresholds.pop() == pytest.approx(model_threshold(cache, rule, row), rel=1e-4)
        for layer in cache.layers:
            sizes = layer.state["sizes"][row]
            assert sizes.sum(-1).tolist() == [n - 4] * layer.facts.kv_heads
            assert (sizes > 0).sum(-1).max() <= int(0.3 * (n - 4))
            assert int(layer.state["length"][row]) == n


@pytest.mark.parametrize("gqa", ["mean", "max", "sum"])
def test_clusters_above_the_threshold_are_read_whole(gqa: str) -> None:
    q, k, v = themed(300, themes=2, noise=0.7)
    spec = f"squeezed:clusters=0.1,recent=20,quantile=0.8,gqa={gqa}"
    rule = parse(spec).read
    assert isinstance(rule, Squeezed)
    result = kvatlas.replay(spec, q, k, v, 280)
    labels, _, centroids, sizes = group_keys(k[:, :260], rule.count(260), iterations=25, seed=0)
    last = q[:, 260:280].view(HEADS, GROUP, 20, DIM).permute(2, 0, 1, 3)
    s = fold(shares(last, centroids[None], sizes[None], DIM**-0.5).flatten(1, 2), HEADS, gqa)  # type: ignore[arg-type]
    threshold = quantile(s[(sizes > 0).expand_as(s)], 0.8)
    numbers = set()
    for step, t in enumerate(range(280, 300)):
        now = q[:, t].view(1, HEADS, GROUP, DIM)
        mine = fold(shares(now, centroids[None], sizes[None], DIM**-0.5).flatten(1, 2), HEADS, gqa)[0]  # type: ignore[arg-type]
        for h in range(HEADS):
            chosen = (mine[h] > threshold)[labels[h]].nonzero().squeeze(1)
            want = torch.cat([chosen, torch.arange(260, t + 1)])
            assert torch.equal(result.read[step][h], want)
            numbers.add(len(want))
    assert len(numbers) > 3, "heads and steps differ in how much they read"


def covered(spec: str) -> tuple[float, float]:
    """Mean share of the tokens read and of the attention mass covered."""
    q, k, v = themed(600, themes=2, noise=0.7)
    result = kvatlas.replay(spec, q, k, v, 560, diagnose=True)
    assert result.covered is not None
    read = [len(r) / (561 + step) for step, heads in enumerate(result.read) for r in heads]
    return sum(read) / len(read), float(result.covered.mean())


def test_attention_is_covered_far_better_than_by_lot() -> None:
    """At no more tokens read; a higher quantile reads less."""
    read, mass = covered("squeezed:quantile=0.8,recent=40")
    less, _ = covered("squeezed:quantile=0.9,recent=40")
    few, by_lot = covered("random:0.3")
    assert less < read < 0.32 and few < 0.32
    assert mass > 0.6 and mass > by_lot + 0.25


def test_a_budget_takes_the_best_clusters_first() -> None:
    q, k, v = themed(300, themes=2, noise=0.7)
    open_ = kvatlas.replay("squeezed:clusters=0.1,recent=20,quantile=0.5", q, k, v, 280)
    capped = kvatlas.replay("squeezed:0.15,clusters=0.1,recent=20,quantile=0.5", q, k, v, 280)
    tiny = kvatlas.replay("squeezed:7,clusters=0.1,recent=20,quantile=0.5", q, k, v, 280)
    for step, (free, most, few) in enumerate(zip(open_.read, capped.read, tiny.read)):
        limit = resolve(0.15, 281 + step)
        assert limit is not None
        for h in range(HEADS):
            assert len(most[h]) <= limit < len(free[h])
            assert torch.isin(most[h], free[h]).all()
            always = torch.arange(260, 281 + step)[-limit:]
            assert torch.isin(always, most[h]).all()
            assert few[h].tolist() == list(range(274 + step, 281 + step)), "what is always read, the latest of it"


@pytest.mark.parametrize(
    "spec", ["squeezed:quantile=0", "squeezed:1.0,quantile=0", "squeezed:1000,quantile=0,recent=5"]
)
def test_reading_all_gives_the_tokens_of_full(spec: str) -> None:
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    assert tokens(lm, ids, spec) == tokens(lm, ids, "full")


def test_without_a_threshold_nothing_is_clustered() -> None:
    cache, _ = ran(lm_of("llama"), "squeezed:quantile=0", prompts(40), 2)
    assert all(not layer.state and layer.selection is None for layer in cache.layers)
    assert parse("squeezed:quantile=0").lossless() and not parse("squeezed").lossless()


@pytest.mark.parametrize("lengths", [(1,), (2, 40), (3, 1), (9,)])
@pytest.mark.parametrize("spec", ["squeezed", "squeezed:recent=1,clusters=1", "squeezed:3,quantile=0.99"])
def test_short_prompts(lengths: tuple[int, ...], spec: str) -> None:
    _, logits = ran(lm_of("llama"), spec, prompts(*lengths), 5)
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize(
    "spec", [SMALL, "squeezed:0.3,clusters=0.3,recent=4,gqa=max", "squeezed:9,clusters=0.2,recent=30"]
)
@pytest.mark.parametrize("arch", ["llama", "gemma3", "opt"])
def test_company_changes_nothing_and_budgets_are_met(arch: str, spec: str) -> None:
    lm, ids = lm_of(arch), prompts(*RAGGED)
    cache, together = ran(lm, spec, ids, 6)
    for layer in cache.layers:
        if layer.read.selects:
            assert layer.selection is not None
            most = torch.tensor([resolve(layer.read.budget, n + 6) or n + 6 for n in RAGGED])
            assert bool((layer.selection.count <= most.unsqueeze(1)).all())
    assert cache.realised().read < 0.9
    for row, one in enumerate(ids):
        torch.testing.assert_close(ran(lm, spec, [one], 6)[1][0], together[row], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["chunked:7", "chunked:3", "eager"])
@pytest.mark.parametrize("spec", [SMALL, "squeezed:clusters=0.3,recent=12"])
def test_chunks_change_nothing(spec: str, mode: str) -> None:
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    whole, parts = (ran(lm, s, ids, 4) for s in (spec, f"{spec},prefill={mode}"))
    torch.testing.assert_close(parts[1], whole[1], atol=1e-3, rtol=1e-3)
    for one, other in zip(whole[0].layers, parts[0].layers):
        torch.testing.assert_close(one.state["threshold"], other.state["threshold"])
        torch.testing.assert_close(one.state["queries"], other.state["queries"], atol=1e-4, rtol=1e-4)


def test_later_turns_are_read_whole() -> None:
    lm = lm_of("llama")
    cache, first = started(lm, SMALL, prompts(40, 23))
    before = [{name: t.clone() for name, t in layer.state.items()} for layer in cache.layers]
    lm.extend(cache, 0, prompts(9)[0])
    lm.step(cache, first)
    for layer, old in zip(cache.layers, before):
        assert all(torch.equal(layer.state[name], tensor) for name, tensor in old.items())
        assert layer.selection is not None
        assert (layer.store.column("cluster")[0, :, 36:] == 0).all()
        assert (layer.store.column("cluster")[0, :, :36] > 0).all()
        for h in range(layer.facts.kv_heads):
            read = layer.selection.index[0, h, : int(layer.selection.count[0, h])]
            assert torch.isin(torch.arange(36, 50), read).all()


@pytest.mark.parametrize("keep", ["h2o:0.5", "streaming:0.6,positions=true", "random:0.5"])
def test_it_reads_of_what_is_kept(keep: str) -> None:
    """Labels move with their slots, and each head clusters what it has."""
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    spec = f"{keep}+{SMALL},quantile=0.6"
    cache, together = ran(lm, spec, ids, 3)
    for layer in cache.layers:
        layer.store.compact()
        labels, pos = layer.store.column("cluster"), layer.store.column("pos")
        for row, n in enumerate(RAGGED):
            held = int(layer.store.lengths[row, 0])
            for h in range(layer.facts.kv_heads):
                mine, at = labels[row, h, :held], pos[row, h, :held]
                assert torch.equal(mine > 0, at < n - 4)
                assert int(layer.state["sizes"][row, h].sum()) >= int((mine > 0).sum())
    alone = ran(lm, spec, ids[1:2], 3)[1]
    torch.testing.assert_close(alone[0], together[1], atol=1e-4, rtol=1e-4)


def test_forks_part() -> None:
    check_forks_part(SMALL)


@pytest.mark.parametrize(
    "spec", ["squeezed", SMALL, "squeezed:0.2,clusters=1", "squeezed:quantile=0", "h2o:0.5+squeezed"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(spec: str, dtype: torch.dtype) -> None:
    cache, _ = ran(lm_of("llama", dtype), spec, prompts(*RAGGED), 4)
    assert cache.bytes().total == reachable(cache) == cache.bytes_held(RAGGED, 5)
    facts, read = LayerFacts(0, 1, 4, 2, 16, dtype, torch.device("cpu"), 0.25), parse(spec).read
    assert read.state_bytes(facts, 100) == sum(t.nbytes for t in read.begin(facts, 100).values())


# --------------------------------------------------------------------- a fixed context

TEXT = "There was once a king who had twelve daughters, each one more beautiful than the other; they slept in one hall."


@pytest.fixture
def lm() -> LM:
    tokenizer = byte_tokenizer()
    return LM(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture
def context(tmp_path: Path) -> Path:
    path = tmp_path / "tale.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def spec_of(context: Path, more: str = "") -> str:
    return f"squeezed:context={context},clusters=0.2,recent=10{more}"


def test_a_context_is_clustered_once_and_kept(lm: LM, context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    plain = calibration._run
    monkeypatch.setattr(calibration, "_run", lambda lm, see, ids: (runs.append(len(ids)), plain(lm, see, ids))[1])
    questions = [TEXT + " Who were they?", TEXT + " Where did they sleep, and why?"]
    first = [g.ids for g in lm.generate(questions, spec_of(context), max_new_tokens=8)]
    assert runs == [len(TEXT)]
    (kept,) = context.parent.glob("*.safetensors")
    assert kept.name.startswith("tale.txt.")
    again = LM(lm.model, lm.tokenizer)
    assert [g.ids for g in again.generate(questions, spec_of(context), max_new_tokens=8)] == first
    assert [g.ids for g in again.generate(questions[:1], spec_of(context, ",quantile=0.5"), max_new_tokens=8)]
    assert len(runs) == 1, "another threshold needs no other clusters"
    alone = [lm.generate(q, spec_of(context), max_new_tokens=8)[0].ids for q in questions]
    assert alone == first


def test_a_context_gives_what_the_same_prompt_would(lm: LM, context: Path) -> None:
    """Labels, centroids and the threshold are those of a prompt that is the context alone."""
    ids = lm.encode_prompts([TEXT])
    fixed, own = lm.new_cache(spec_of(context)), lm.new_cache("squeezed:clusters=0.2,recent=10")
    for cache in (fixed, own):
        lm.prefill(cache, ids, reserve=4)
    for one, other in zip(fixed.layers, own.layers):
        assert not one.state
        assert torch.equal(one.store.column("cluster"), other.store.column("cluster"))
        count = one.constants["sizes"].shape[1]
        assert torch.equal(one.constants["sizes"], other.state["sizes"][0, :, :count])
        torch.testing.assert_close(one.constants["centroids"], other.state["centroids"][0, :, :count])
        torch.testing.assert_close(one.constants["threshold"], other.state["threshold"][0])
    token = torch.tensor([5])
    torch.testing.assert_close(lm.step(fixed, token), lm.step(own, token), atol=1e-5, rtol=1e-5)


def test_prompts_share_a_contexts_clusters(lm: LM, context: Path) -> None:
    """They are the model's, not each sequence's."""
    prompts = [TEXT + " a", TEXT + " bcd"]
    cache = lm.new_cache(spec_of(context))
    lm.prefill(cache, lm.encode_prompts(prompts), reserve=6)
    lm.step(cache, torch.tensor([5, 6]))
    lengths = [len(p) for p in prompts]
    assert cache.bytes().total == reachable(cache) == cache.bytes_held(lengths, 6)
    for layer in cache.layers:
        assert layer.selection is not None and layer.selection.count.max() < max(lengths)
        assert (layer.store.column("cluster")[0, :, : len(TEXT) - 10] > 0).all()
        assert (layer.store.column("cluster")[0, :, len(TEXT) - 10 :] == 0).all()


@pytest.mark.parametrize("spoilt", ["text", "model", "parameter", "cut short", "something else"])
def test_what_does_not_match_is_found_anew(lm: LM, context: Path, spoilt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    plain = calibration._run
    monkeypatch.setattr(calibration, "_run", lambda lm, see, ids: (runs.append(len(ids)), plain(lm, see, ids))[1])
    lm.new_cache(spec_of(context))
    (kept,) = context.parent.glob("*.safetensors")
    spec, other = spec_of(context), lm.model
    if spoilt == "text":
        context.write_text(TEXT + " More.", encoding="utf-8")
    elif spoilt == "model":
        other = tiny_model("llama", seed=1, vocab_size=lm.facts.vocab)
    elif spoilt == "parameter":
        spec = f"squeezed:context={context},clusters=0.1,recent=10"
    elif spoilt == "cut short":
        kept.write_bytes(kept.read_bytes()[:-100])
    else:
        kept.write_bytes(b"not a file of tensors")
    LM(other, lm.tokenizer).new_cache(spec)
    LM(other, lm.tokenizer).new_cache(spec)
    assert len(runs) == 2, "once before and once after"
    assert len(list(context.parent.glob("*.safetensors"))) == (2 if spoilt == "model" else 1)


@pytest.mark.parametrize(
    "prompt", ["Once upon a time there was a princess.", "There was once", TEXT[:60] + "x" + TEXT[61:]]
)
def test_a_prompt_must_begin_with_the_context(lm: LM, context: Path, prompt: str) -> None:
    with pytest.raises(UserError, match="does not begin with the text of context="):
        lm.generate(prompt, spec_of(context), max_new_tokens=2)


def test_a_tokenizer_may_join_words_where_context_and_question_meet() -> None:
    rule = Squeezed(clusters=0.2, recent=10)
    context = list(range(100))
    rule.check_prompt([*context[:98], 500, 501, 502], context)
    rule.check_prompt(context, context)
    for ids in ([*context[:90], 500, 501], context[:99][::-1], context[:50]):
        with pytest.raises(UserError):
            rule.check_prompt(ids, context)


def test_a_context_needs_a_tokenizer(context: Path) -> None:
    with pytest.raises(UserError, match="needs a tokenizer"):
        lm_of("llama").new_cache(spec_of(context))


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe\x00 not text", "not UTF-8"), (b"  \n", "is empty"), (b"x" * 600, "positions")]
)
def test_a_context_must_be_text_that_fits(lm: LM, tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        lm.new_cache(spec_of(path))
    assert "\n" not in str(error.value)


def test_an_unwritable_folder_gets_one_clear_line(lm: LM, context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any work is done; and where the system finds out only later, too."""
    from kvatlas.engine import kept

    runs: list[int] = []
    plain = calibration._run
    monkeypatch.setattr(calibration, "_run", lambda lm, see, ids: (runs.append(len(ids)), plain(lm, see, ids))[1])
    with monkeypatch.context() as locked:
        locked.setattr(kept.os, "access", lambda path, mode: False)
        with pytest.raises(UserError, match="cannot be written") as error:
            lm.new_cache(spec_of(context))
    assert "\n" not in str(error.value) and not runs

    usual = Path.open

    def full(self: Path, mode: str = "r", *more: object) -> object:
        if "x" in mode or "w" in mode:
            raise OSError(28, "No space left on device")
        return usual(self, mode, *more)  # type: ignore[call-overload]

    with monkeypatch.context() as locked:
        locked.setattr(Path, "open", full)
        with pytest.raises(UserError, match=r"cannot be written.*No space left"):
            lm.new_cache(spec_of(context))
    assert [p.name for p in context.parent.iterdir()] == ["tale.txt"]


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("squeezed:clusters=0", "clusters must be above 0 and at most 1"),
        ("squeezed:clusters=1.5", "clusters must be above 0 and at most 1"),
        ("squeezed:quantile=1", "quantile must be 0 .* to below 1"),
        ("squeezed:quantile=-0.1", "quantile must be 0 .* to below 1"),
        ("squeezed:recent=0", "recent must be at least 1 token"),
        ("squeezed:iterations=0", "iterations must be at least 1"),
        ("squeezed:seed=-1", "seed must be 0 or more"),
        ("squeezed:gqa=best", "mean or max or sum"),
        ("squeezed:context=/nowhere/at/all.txt", "context=/nowhere/at/all.txt is not a file"),
        ("squeezed+pqcache:0.1", "both answer 'read'"),
    ],
)
def test_bad_parameters_get_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse(spec)
    assert "\n" not in str(error.value)
