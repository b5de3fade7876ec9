"""Eviction with a second chance: the archive holds exactly what was evicted, and reading all of it is `full`."""

from __future__ import annotations

import pytest
import torch
from specs import lm_of, prompts
from tiny import KV_HEADS

from kvatlas.engine.cache import KVCache

LENGTHS = (60, 23, 41)


def ran(
    spec: str, lengths: tuple[int, ...] = LENGTHS, steps: int = 8, arch: str = "llama"
) -> tuple[KVCache, torch.Tensor]:
    lm = lm_of(arch)
    cache = lm.new_cache(spec)
    logits = lm.prefill(cache, prompts(*lengths), reserve=steps + 1)
    for _ in range(steps):
        logits = lm.step(cache, logits.argmax(-1))
    return cache, logits


@pytest.mark.parametrize("arch", ["llama", "opt", "gpt_oss"])
@pytest.mark.parametrize(
    "keep", ["", "snapkv:0.3+", "streaming:0.3,positions=true+", "random:0.3+", "scissorhands:0.3+"]
)
def test_with_all_pages_read_it_is_full(arch: str, keep: str) -> None:
    spec = f"{keep}recall:pages=1000" if keep else "recall:0.3,pages=1000"
    _, logits = ran(spec, arch=arch)
    torch.testing.assert_close(logits, ran("full", arch=arch)[1], atol=2e-4, rtol=2e-4)


def test_nothing_is_lost_and_nothing_is_held_twice() -> None:
    """Of each sequence and KV head, every token is either kept or in the archive: keys compared."""
    cache, _ = ran("recall:0.3")
    full, _ = ran("full")
    for layer, whole in zip(cache.layers, full.layers):
        assert layer.archive is not None
        layer.archive.compact(), layer.store.compact()
        for row, n in enumerate(LENGTHS):
            for head in range(KV_HEADS):
                kept = layer.store.row_columns(row)["k"][head]
                gone = layer.archive.data["k"][row, head, : int(layer.archive.lengths[row, head])]
                ours = torch.cat([kept, gone])
                theirs = whole.store.row_columns(row)["k"][head]
                assert len(ours) == n + 8
                if layer.facts.layer == 0:  # later layers see other inputs once something was left unread
                    gap = torch.cdist(ours, theirs, compute_mode="donot_use_mm_for_euclid_dist")
                    assert gap.amin(1).max() < 1e-4 and len(gap.argmin(1).unique()) == n + 8


def test_at_the_device_bytes_of_its_keep_rule_but_for_the_bounds() -> None:
    """Evicted bytes are on the host; the device pays for their bounds and for what is being fetched."""
    recall, h2o = ran("recall:0.3")[0], ran("h2o:0.3")[0]
    one, other = recall.bytes(), h2o.bytes()
    assert (one.device_payload, one.device_padding) == (other.device_payload, other.device_padding)
    assert one.host_payload > 0 and other.host == 0
    assert one.total == recall.bytes_held(LENGTHS, 9)
    # two bounds of 16 floats for each page of 16 evicted slots (and 9 to come), lengths and free slots of the archive
    slots = 42 + 9
    assert sum(t.nbytes for layer in recall.layers for t in layer.state.values()) == 4 * 3 * 2 * -(-slots // 16) * 128


@pytest.mark.parametrize(
    "spec", ["recall:0.3,page=4,pages=2", "recall:0.3,page=4,pages=2,archive_as=int8", "recall:0.3,page=3,pages=2+int8"]
)
def test_results_do_not_depend_on_company(spec: str) -> None:
    _, together = ran(spec)
    for row, n in enumerate(LENGTHS):
        torch.testing.assert_close(ran(spec, (n,))[1][0], together[row], atol=1e-3, rtol=1e-3)


def test_it_reads_what_is_kept_and_a_few_pages() -> None:
    cache, _ = ran("recall:0.3,page=4,pages=2")
    for layer in cache.layers:
        assert layer.selection is not None and layer.selection.count.max() <= 8
        assert layer.read_tokens() <= layer.held_tokens() + len(LENGTHS) * 9
    assert cache.realised().kept < 0.3 < cache.realised().read < 0.6


def test_encoded_tokens_move_as_they_are() -> None:
    """What is kept as codes goes to the archive as the same codes: nothing is quantised twice."""
    cache, _ = ran("recall:0.3+int4")
    names = {c.name for c in cache.layers[0].archive.layout.columns}  # type: ignore[union-attr]
    assert names == {c.name for c in cache.layers[0].columns if c.kind == "payload"}
    assert cache.layers[0].archive.layout.encode is cache.layers[0].encode  # type: ignore[union-attr]


def test_without_a_budget_there_is_no_archive() -> None:
    cache, logits = ran("recall")
    assert all(layer.archive is None and not layer.state for layer in cache.layers)
    torch.testing.assert_close(logits, ran("full")[1], atol=0, rtol=0)


def test_rows_can_be_dropped_and_repeated() -> None:
    lm = lm_of("llama")
    cache, logits = ran("recall:0.3,page=4,pages=2")
    token = logits.argmax(-1)
    fork, _ = ran("recall:0.3,page=4,pages=2")
    fork.select_rows([2, 0, 0])
    one, other = lm.step(cache, token), lm.step(fork, token[[2, 0, 0]])
    torch.testing.assert_close(other, one[[2, 0, 0]], atol=1e-4, rtol=1e-4)


def test_a_later_turn_sees_the_archive_too() -> None:
    """A question that is asked in a later turn is read over all that was ever said."""
    lm = lm_of("llama")
    outs = []
    for spec in ("recall:0.3", "full", "h2o:0.3"):
        cache = lm.new_cache(spec)
        lm.prefill(cache, prompts(60), reserve=4)
        outs.append(lm.extend(cache, 0, prompts(11)[0]))
    torch.testing.assert_close(outs[0], outs[1], atol=2e-4, rtol=2e-4)
    assert not torch.allclose(outs[2], outs[1], atol=1e-2)
