"""The authors' own algorithms, reproduced: vectors made by running their published code."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kvatlas.engine.replay import replay
from kvatlas.strategy.read.speculation import partial_columns, skew, speculate

GOLDEN = Path(os.environ.get("KVATLAS_GOLDEN", Path(__file__).parents[2] / "shared" / "golden"))


def load(name: str) -> dict[str, torch.Tensor]:
    path = GOLDEN / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"the authors' vectors are not at {GOLDEN} (set KVATLAS_GOLDEN)")
    with np.load(path, allow_pickle=False) as data:
        return {key: torch.from_numpy(np.asarray(data[key])) for key in data.files}


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
