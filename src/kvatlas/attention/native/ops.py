"""The kernels as functions on tensors. `build.available()` says whether they can be called.

All tensors are on the CPU; `q`, `k` and `v` are all bfloat16 or all float32; sums are in float32 throughout.
`B` sequences, `H` KV heads, `G` query heads per KV head (query head `h * G + g` reads KV head `h`); the head dimension
`D` is a multiple of 8.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from kvatlas.attention.native import build

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
DTYPES = (torch.bfloat16, torch.float32)
MAX_DIM = 256
MAX_GROUP = 64
MAX_ROWS = 16
ALONE = 1 << 17
"""Bytes under which one thread is faster than two that have to meet."""

# p: pointer, i: int64, f: float; the order is that of kernel.cpp.
SIGNATURES = {
    "kvatlas_decode": "i pppp pp iiii p pp i i f i",
    "kvatlas_decode_paged": "i pppp pp iiiii p pi p i f i",
    "kvatlas_decode_packed": "i ppppp ppp iiiiii p pp i i f i",
    "kvatlas_quantise": "i ppp iiii i",
    "kvatlas_column_mass": "i pppp iiiii p iii f i",
    "kvatlas_linear": "i ppp iii i",
    "kvatlas_speculate": "i pp pp pp iiiii p ff i i",
    "kvatlas_bounds": "i ppp pp iiiii p i i",
    "kvatlas_choose": "ppp iii i",
    "kvatlas_choose_pages": "i ppp pp ppp ppp iiiiiii p iii",
    "kvatlas_copy_rows": "ppp iiii p i",
    "kvatlas_between": "i pppppp pppppp p f i",
    "kvatlas_rms_norm": "i ppp ii f",
    "kvatlas_rope": "i ppp iiii",
}


@functools.cache
def function(library: ctypes.CDLL, name: str) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """One C function with its argument types set."""
    kinds = {"p": POINTER, "i": INT, "f": FLOAT}
    found = getattr(library, name)
    found.argtypes = [kinds[kind] for kind in SIGNATURES[name].replace(" ", "")]
    found.restype = None
    return found


def call(name: str, *arguments: object) -> None:
    """Call a C function of the library in use."""
    library = build.built().library
    assert library is not None, build.why()
    function(library, name)(*arguments)


def isa() -> str:
    """The instruction sets in use: `avx512+bf16+amx`, `avx512+bf16`, `avx512` or `generic`."""
    library = build.built().library
    assert library is not None, build.why()
    library.kvatlas_isa.restype = ctypes.c_char_p
    return library.kvatlas_isa().decode()


@functools.lru_cache(maxsize=4096)
def strides(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """Strides as a C array. They repeat from step to step, so the arrays are kept."""
    return (INT * len(values))(*values)


Sizes = tuple[int, ...]
Layout = tuple[tuple[int, int, int, int], ctypes.Array]


@functools.lru_cache(maxsize=4096)
def layout(
    dtypes: tuple[torch.dtype, ...], q: Sizes, k: Sizes, v: Sizes, q_stride: Sizes, k_stride: Sizes, v_stride: Sizes
) -> Layout:
    """(B, H, G, D) and the stores' strides; checks once per layout what both decode kernels ask of their tensors."""
    batch, query_heads, dim = q
    heads = k[1]
    assert dtypes[0] == dtypes[1] == dtypes[2] and dtypes[0] in DTYPES, dtypes
    assert k == v and k[3] == dim and dim % 8 == 0 and dim <= MAX_DIM, (q, k, v)
    assert (q_stride[1], q_stride[2]) == (dim, 1) and (batch == 1 or q_stride[0] == query_heads * dim), q_stride
    assert k_stride[3] == v_stride[3] == 1, (k_stride, v_stride)
    assert query_heads % heads == 0 and query_heads // heads <= MAX_GROUP, (query_heads, heads)
    return (batch, heads, query_heads // heads, dim), strides(*k_stride[:3], *v_stride[:3])


def layout_of(q: Tensor, k: Tensor, v: Tensor) -> Layout:
    """The layout of these tensors."""
    dtypes = (q.dtype, k.dtype, v.dtype)
    return layout(dtypes, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride())


def threads(size: int) -> int:
    """Threads for a call that reads ``size`` bytes."""
    return 1 if size < ALONE else torch.get_num_threads()


def weights_width(probs: bool, width: int | None, number: Tensor, index: Tensor | None = None) -> int | None:
    """Columns of the weights: as asked, else those of the index, else the greatest length; None without weights."""
    if not probs or width is not None:
        return width if probs else None
    return int(number.max()) if index is None else index.shape[2]


def outputs(q: Tensor, width: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Room for out, lse and, with a width, weights."""
    batch, query_heads = q.shape[:2]
    probs = None if width is None else q.new_empty(batch, query_heads, width, dtype=torch.float32)
    return torch.empty_like(q), q.new_empty(batch, query_heads, dtype=torch.float32), probs


def decode_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    scale: float,
    index: Tensor | None = None,
    count: Tensor | None = None,
    probs: bool = False,
    width: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One query per sequence against the filled slots, or against those that `index` names; nothing is gathered.

    q [B, Hq, D] contiguous; k, v [B, H, capacity, D] with any strides but the last; lengths [B, H] int64 counts the
    filled slots. With index [B, H, n] int64 and count [B, H] int64, slots `index[b, h, :count[b, h]]` are read and
    lengths is not. Returns out [B, Hq, D], lse [B, Hq] float32 and, with probs, weights [B, Hq, width] float32 that
    sum to 1 and are zero past the length; width is by default that of the index or the greatest length. Sequences of
    no keys give 0 and lse -inf. A sequence's result does not depend on its batch or on the number of threads.
    """
    sizes, apart = layout_of(q, k, v)
    number = lengths if index is None else count
    assert number is not None and number.dtype == torch.int64 and number.is_contiguous()
    assert number.shape == sizes[:2] and k.shape[0] == sizes[0], (number.shape, k.shape)
    index_width = 0
    if index is not None:
        assert index.dtype == torch.int64 and index.is_contiguous() and index.shape[:2] == sizes[:2]
        index_width = index.shape[2]
    out, lse, weights = outputs(q, weights_width(probs, width, number, index))
    call(
        "kvatlas_decode",
        q.dtype == torch.bfloat16,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        None if weights is None else weights.data_ptr(),
        *sizes,
        apart,
        number.data_ptr(),
        None if index is None else index.data_ptr(),
        index_width,
        0 if weights is None else weights.shape[2],
        scale,
        threads(sizes[0] * sizes[1] * (index_width or k.shape[2]) * sizes[3] * 2 * k.element_size()),
    )
    return out, lse, weights


def decode_attend_paged(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    probs: bool = False,
    width: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`decode_attend` over pages: slot s of sequence b is slot `s % block` of block `table[b, s // block]`.

    k_pool, v_pool [blocks, H, block, D]; table [B, most blocks] int32 or int64; lengths [B] or [B, H] int64.
    """
    sizes, apart = layout_of(q, k_pool, v_pool)
    table = table.to(torch.int64).contiguous()
    lengths = (lengths[:, None].expand(sizes[:2]) if lengths.dim() == 1 else lengths).contiguous()
    assert lengths.dtype == torch.int64 and lengths.shape == sizes[:2] and table.shape[0] == sizes[0]
    out, lse, weights = outputs(q, weights_width(probs, width, lengths))
    call(
        "kvatlas_decode_paged",
        q.dtype == torch.bfloat16,
        q.data_ptr(),
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        None if weights is None else weights.data_ptr(),
        *sizes,
        k_pool.shape[2],
        apart,
        table.data_ptr(),
        table.shape[1],
        lengths.data_ptr(),
        0 if weights is None else weights.shape[2],
        scale,
        threads(sizes[0] * sizes[1] * table.shape[1] * k_pool.shape[2] * sizes[3] * 2 * k_pool.element_size()),
    )
    return out, lse, weights


def column_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scale: float,
    first_query: int = 0,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """The attention that each key received, mass [Hq, Tk] float32, in memory linear in the lengths.

    q [Hq, Tq, D] and k [H, Tk, D], the last dimension contiguous; lse [Hq, Tq] float32 is each row's log-sum-exp.
    Query row i has position Tk - Tq + i; it sees keys up to its position (all of them if not causal), and with a window
    only those less than `window` positions back. Rows from first_query on count.
    """
    (query_heads, queries, dim), (heads, keys, _) = q.shape, k.shape
    assert q.dtype == k.dtype and q.dtype in DTYPES and dim % 8 == 0 and dim <= MAX_DIM and k.shape[2] == dim
    assert q.stride(2) == 1 and k.stride(2) == 1 and query_heads % heads == 0
    assert lse.dtype == torch.float32 and lse.shape == (query_heads, queries)
    lse = lse.contiguous()
    mass = lse.new_empty(query_heads, keys)
    call(
        "kvatlas_column_mass",
        q.dtype == torch.bfloat16,
        q.data_ptr(),
        k.data_ptr(),
        lse.data_ptr(),
        mass.data_ptr(),
        query_heads,
        heads,
        queries,
        keys,
        dim,
        strides(*q.stride()[:2], *k.stride()[:2]),
        first_query,
        -1 if window is None else window,
        causal,
        scale,
        threads(query_heads * queries * keys),
    )
    return mass


def linear_small(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ w.T for few rows, reading w once: x [M <= 16, K], w [N, K], both bfloat16 or both float32, contiguous.

    Sums are in float32 and in an order that does not depend on M. Returns (or fills) out [M, N] of the same dtype.
    """
    (rows, depth), columns = x.shape, w.shape[0]
    assert x.dtype == w.dtype and x.dtype in DTYPES and w.shape[1] == depth and depth % 8 == 0
    assert 0 < rows <= MAX_ROWS and x.is_contiguous() and w.is_contiguous()
    if out is None:
        out = x.new_empty(rows, columns)
    assert out.shape == (rows, columns) and out.dtype == x.dtype and out.is_contiguous()
    call(
        "kvatlas_linear",
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        w.data_ptr(),
        out.data_ptr(),
        rows,
        columns,
        depth,
        threads(w.nbytes),
    )
    return out
