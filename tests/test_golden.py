"""The authors' own algorithms, reproduced: vectors made by running their published code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvatlas.attention.bounds import bound_scores
from kvatlas.engine.replay import replay
from kvatlas.strategy.read.pages import bounds_of
from kvatlas.strategy.read.speculation import partial_columns, skew, speculate

GOLDEN = Path(os.environ.get("KVATLAS_GOLDEN", Path(__file__).parents[2] / "shared" / "golden"))


def load(name: str) -> dict[str, Any]:
    path = GOLDEN / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"the authors' vectors are not at {GOLDEN} (set KVATLAS_GOLDEN)")
    with np.load(path, allow_pickle=False) as data:
        texts = {key: str(data[key]) for key in data.files if data[key].dtype.kind == "U"}
        return texts | {key: torch.from_numpy(np.asarray(data[key])) for key in data.files if key not in texts}


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize("prefill", ["flash", "eager", "chunked:7"])
def test_h2o_real_drop(case: str, prefill: str) -> None:
    g = load(f"h2o_{case}")
    spec = f"h2o:heavy={int(g['heavy'])},recent={int(g['recent'])},prefill={prefill}"
    check_h2o(spec, g)


@pytest.mark.parametrize("case", ["a", "b"])
def test_h2o_flexgen(case: str) -> None:
    g = load(f"h2o_flexgen_{case}")
    check_h2o(f"h2o:variant=flexgen,heavy={int(g['hh'])}", g)


def check_h2o(spec: str, g: dict[str, torch.Tensor]) -> None:
    result = replay(spec, g["q"], g["k"], g["v"], int(g["prompt_len"]))
    torch.testing.assert_close(result.prefill_output.transpose(0, 1), g["prefill_out"], atol=1e-5, rtol=0)
    torch.testing.assert_close(result.output, g["decode_out"], atol=1e-5, rtol=0)
    assert len(result.kept) == len(g["kept"])
    for step, kept in enumerate(result.kept):
        assert torch.equal(kept, g["kept"][step].long()), f"step {step}"
        if "scores" in g:
            torch.testing.assert_close(result.scores[step], g["scores"][step].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["a", "b"])
def test_infinigen_pieces(case: str) -> None:
    g = load(f"infinigen_{case}")
    heads, dim = g["skew"].shape[:2]
    n = len(g["hidden"]) - 1
    q, k = ((g["hidden"] @ g[w].T).unflatten(-1, (heads, dim)).transpose(0, 1) for w in ("w_q", "w_k"))
    a = skew(q[:, :n], k[:, :n])
    torch.testing.assert_close(a.abs(), g["skew"].abs(), atol=1e-3, rtol=0)
    torch.testing.assert_close(a.transpose(1, 2) @ a, torch.eye(dim).expand(heads, -1, -1), atol=1e-5, rtol=0)
    columns = partial_columns(q[:, :n] @ a, float(g["partial_ratio"]))
    assert torch.equal(columns, g["partial_index"].long().sort(-1).values)
    at = columns.unsqueeze(1)
    q_part = (q[:, n:] @ a).gather(-1, at) / dim**0.5
    k_part = (k[:, :n] @ a).gather(-1, at.expand(-1, n, -1))
    chosen = speculate(q_part, k_part, float(g["alpha"]), int(g["max_num_kv"]))
    assert torch.equal(chosen.sort(-1).values, g["selected"].long())


@pytest.mark.parametrize("case", ["a", "b"])
def test_infinigen_replay(case: str) -> None:
    """The whole strategy gives the pieces' choice: in replay the recorded prompt is the calibration."""
    g = load(f"infinigen_{case}")
    heads, dim = g["skew"].shape[:2]
    n = len(g["hidden"]) - 1
    q, k = ((g["hidden"] @ g[w].T).unflatten(-1, (heads, dim)).transpose(0, 1) for w in ("w_q", "w_k"))
    spec = f"infinigen:{int(g['max_num_kv'])},alpha={float(g['alpha'])},partial={float(g['partial_ratio'])}"
    result = replay(spec, q, k, k, n, hidden=g["hidden"], w_q=g["w_q"])
    want = torch.cat([g["selected"].long(), torch.full((heads, 1), n)], 1)
    assert torch.equal(torch.stack(list(result.read[0])), want)


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize("prefill", ["flash", "eager", "chunked:37"])
def test_snapkv(case: str, prefill: str) -> None:
    """Positions exactly under average pooling; max-pooling makes ties at the cut, so there the pooled votes count."""
    g = load(f"snapkv_{case}")
    window, capacity, kernel = (int(g[name]) for name in ("window", "capacity", "kernel"))
    pool = g["pooling"][:3]
    spec = f"snapkv:window={window},capacity={capacity},kernel={kernel},pool={pool},prefill={prefill}"
    kept = replay(spec, g["q"], g["k"], g["v"], g["q"].shape[1]).kept[0]
    want = g["kept"].long()
    if pool == "avg":
        assert torch.equal(kept, want)
        return
    votes = pooled_votes(g["q"], g["k"], window, kernel)
    for head in range(len(want)):
        ours, theirs = ({i for i in at[head].tolist() if i < votes.shape[1]} for at in (kept, want))
        assert len(ours) == len(theirs) == capacity - window
        least = votes[head, sorted(theirs)].min()
        torch.testing.assert_close(votes[head, sorted(ours)].min(), least, rtol=1e-5, atol=0)
        assert all(abs(votes[head, i] - least) <= 1e-5 * least for i in ours ^ theirs), "only ties may differ"


def pooled_votes(q: torch.Tensor, k: torch.Tensor, window: int, kernel: int) -> torch.Tensor:
    """Max-pooled sums of the last queries' weights on all keys before the window, ``[H, T - window]``."""
    n = q.shape[1]
    scores = q[:, -window:] @ k.transpose(1, 2) * q.shape[2] ** -0.5
    future = torch.arange(n) > torch.arange(n - window, n).unsqueeze(1)
    votes = scores.masked_fill(future, float("-inf")).softmax(-1).sum(1)[:, :-window]
    return torch.nn.functional.max_pool1d(votes, kernel, stride=1, padding=kernel // 2)


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize("prefill", ["flash", "chunked:50"])
def test_quest(case: str, prefill: str) -> None:
    """The vectors' query is the last token's, which is the decode step; a prefill's queries choose nothing."""
    g = load(f"quest_{case}")
    q = torch.zeros_like(g["k"])
    q[:, -1] = g["q"]
    spec = f"quest:page={int(g['page'])},budget={int(g['budget'])},newest=false,prefill={prefill}"
    result = replay(spec, q, g["k"], g["v"], g["k"].shape[1] - 1)
    for head, read in enumerate(result.read[0]):
        assert torch.equal(read, g["mask"][head].nonzero()[:, 0]), f"head {head}"
    torch.testing.assert_close(result.output[0], g["out"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["a", "b"])
def test_quest_page_scores(case: str) -> None:
    g = load(f"quest_{case}")
    low, high = bounds_of(g["k"].unsqueeze(0), int(g["page"]))
    total = torch.full(low.shape[:2], low.shape[2])
    scores = bound_scores(g["q"].view(1, -1, 1, low.shape[3]), low, high, total)[0]
    torch.testing.assert_close(scores, g["page_scores"], rtol=1e-4, atol=1e-4)
