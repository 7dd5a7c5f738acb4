"""
Triton kernels for the hidden part of an FFN with experts: between its input projections and its down projection.

With rows H of low-rank inputs, zero in the columns of experts that a pair does not have, and all experts' matrices B as
one [C, f], they compute for token t with its K pairs

    a_tj = act(G_t + Hg_tj Bg) ⊙ (U_t + Hu_tj Bu),    z_t = Σ_j w_tj a_tj,    low_tj = A a_tj

in one pass over G and U [T, f], and their gradients in two: one by tokens, and one by columns for the matrices. Nothing
of size [P, f] is ever written. Mixing "output" has K = top_k pairs with the gates w. Mixing "projection" is the case
K = 1, w = 1 whose H holds all chosen experts.

Sums over f and over tokens are cut into parts, each written by one program and added in a fixed order: the same input
gives the same bits. Nothing waits for the device.

Legend: T tokens, K pairs of each (K2 the next power of two), P = T·K pairs, C = n·r columns, f the FFN's intermediate
size. In the kernels, a tile has rows (token, slot), BT·K2 of them, and BF of the f columns; what a flag leaves out is
None.
"""

# mypy: disable-error-code="union-attr"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .dispatch import Both


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a kernel's tile, and the warps of a program."""

    rows: int
    columns: int
    warps: int


# First guesses: they have not been tuned on a GPU.
FORWARD = Tile(rows=32, columns=64, warps=4)
BACKWARD_TOKENS = Tile(rows=32, columns=64, warps=4)
BACKWARD_WEIGHTS = Tile(rows=32, columns=64, warps=4)


@triton.jit
def _activation(g, ACT: tl.constexpr):
    """The activation and its derivative."""
    if ACT == "silu":
        s = tl.sigmoid(g)
        value = g * s
        slope = s * (1 + g * (1 - s))
    elif ACT == "gelu":
        cdf = 0.5 * (1 + tl.math.erf(g * 0.7071067811865476))
        value = g * cdf
        slope = cdf + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    elif ACT == "gelu_tanh":
        inner = 1.5957691216057308 * (g + 0.044715 * g * g * g)
        s = tl.sigmoid(inner)  # (1 + tanh(inner / 2)) / 2
        value = g * s
        slope = s + g * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * g * g)
    else:
        value = tl.maximum(g, 0.0)
        slope = tl.where(g > 0, 1.0, 0.0)
    return value, slope


@triton.jit
def _place(block, tokens, K: tl.constexpr, K2: tl.constexpr, ROWS: tl.constexpr):
    """Token, pair and whether they are real, of each row of a block of tokens."""
    row = tl.arange(0, ROWS)
    t, j = block * (ROWS // K2) + row // K2, row % K2
    return t, t * K + j, (t < tokens) & (j < K)


@triton.jit
def _rows(X, index, real, c, C):
    """Rows of a contiguous [·, C], as a tile; zero where a row is not real."""
    mask = real[:, None] & (c < C)[None, :]
    return tl.load(X + index.to(tl.int64)[:, None] * C + c[None, :], mask=mask, other=0.0)


@triton.jit
def _columns(M, stride, c, C, f, F):
    """Columns of a matrix [C, F], as a tile."""
    mask = (c < C)[:, None] & (f < F)[None, :]
    return tl.load(M + c.to(tl.int64)[:, None] * stride + f[None, :], mask=mask, other=0.0)


@triton.jit
def _of_tokens(X, stride, t, real, f, F):
    """Rows t of a [T, F], as a tile in float32."""
    mask = real[:, None] & (f < F)[None, :]
    return tl.load(X + t.to(tl.int64)[:, None] * stride + f[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_tokens(X, x, block, tokens, f, F, K2: tl.constexpr):
    """Write the sum over each token's slots of a tile to a contiguous [T, F]."""
    BT: tl.constexpr = x.shape[0] // K2
    total = tl.sum(tl.reshape(x, (BT, K2, x.shape[1])), 1)
    t = block * BT + tl.arange(0, BT)
    mask = (t < tokens)[:, None] & (f < F)[None, :]
    tl.store(X + t.to(tl.int64)[:, None] * F + f[None, :], total.to(X.dtype.element_ty), mask=mask)


@triton.jit
def _pairs(
    G, U, stride_g, stride_u, hg, hu, bg, bu, t, real, f, F,
    GATED: tl.constexpr, HAS_HG: tl.constexpr, HAS_HU: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The pairs' activation act(g), its derivative, and its factor u."""
    g = _of_tokens(G, stride_g, t, real, f, F)
    if HAS_HG:
        g += tl.dot(hg, bg, input_precision=PRECISION)
    act, slope = _activation(g, ACT)
    if GATED:
        u = _of_tokens(U, stride_u, t, real, f, F)
        if HAS_HU:
            u += tl.dot(hu, bu, input_precision=PRECISION)
    else:
        u = tl.full(g.shape, 1.0, tl.float32)
    return act, slope, u


@triton.jit
def _forward(
    G, U, Hg, Hu, Bg, Bu, W, A, Z, LOW, tokens, F, C, stride_g, stride_u, stride_bg, stride_bu, steps,
    K: tl.constexpr, K2: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, GATED: tl.constexpr,
    HAS_HG: tl.constexpr, HAS_HU: tl.constexpr, HAS_A: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z [T, F] and low [parts, P, C] of ROWS pairs and one part of the F columns."""
    block, c = tl.program_id(0), tl.arange(0, BC)
    t, pair, real = _place(block, tokens, K, K2, ROWS)
    w = tl.load(W + pair, mask=real, other=0.0).to(tl.float32)
    hg = _rows(Hg, pair, real, c, C) if HAS_HG else None
    hu = _rows(Hu, pair, real, c, C) if HAS_HU else None
    low = tl.zeros((ROWS, BC), tl.float32)
    for step in range(steps):
        f = (tl.program_id(1) * steps + step) * BF + tl.arange(0, BF)
        bg = _columns(Bg, stride_bg, c, C, f, F) if HAS_HG else None
        bu = _columns(Bu, stride_bu, c, C, f, F) if HAS_HU else None
        act, _, u = _pairs(
            G, U, stride_g, stride_u, hg, hu, bg, bu, t, real, f, F, GATED, HAS_HG, HAS_HU, ACT, PRECISION
        )
        a = act * u
        _store_tokens(Z, a * w[:, None], block, tokens, f, F, K2)
        if HAS_A:
            matrix = _columns(A, F, c, C, f, F)
            low += tl.dot(a.to(matrix.dtype), tl.trans(matrix), input_precision=PRECISION)
    if HAS_A:
        at = LOW + (tl.program_id(1).to(tl.int64) * tokens * K + pair)[:, None] * C + c[None, :]
        tl.store(at, low, mask=real[:, None] & (c < C)[None, :])


@triton.jit
def _backward_tokens(
    G, U, Hg, Hu, Bg, Bu, W, A, DZ, DLOW, DG, DU, DHG, DHU, DW,
    tokens, F, C, stride_g, stride_u, stride_bg, stride_bu, steps,
    K: tl.constexpr, K2: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, GATED: tl.constexpr,
    HAS_HG: tl.constexpr, HAS_HU: tl.constexpr, HAS_A: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of G, U [T, F], of Hg, Hu [parts, P, C] and of w [parts, P]; tiles as in `_forward`."""
    block, c = tl.program_id(0), tl.arange(0, BC)
    t, pair, real = _place(block, tokens, K, K2, ROWS)
    w = tl.load(W + pair, mask=real, other=0.0).to(tl.float32)
    hg = _rows(Hg, pair, real, c, C) if HAS_HG else None
    hu = _rows(Hu, pair, real, c, C) if HAS_HU else None
    d_low = _rows(DLOW, pair, real, c, C) if HAS_A else None
    d_hg = tl.zeros((ROWS, BC), tl.float32)
    d_hu = tl.zeros((ROWS, BC), tl.float32)
    d_w = tl.zeros((ROWS,), tl.float32)
    for step in range(steps):
        f = (tl.program_id(1) * steps + step) * BF + tl.arange(0, BF)
        bg = _columns(Bg, stride_bg, c, C, f, F) if HAS_HG else None
        bu = _columns(Bu, stride_bu, c, C, f, F) if HAS_HU else None
        act, slope, u = _pairs(
            G, U, stride_g, stride_u, hg, hu, bg, bu, t, real, f, F, GATED, HAS_HG, HAS_HU, ACT, PRECISION
        )
        d_a = _of_tokens(DZ, F, t, real, f, F)
        d_w += tl.sum(act * u * d_a, 1)
        d_a *= w[:, None]
        if HAS_A:
            d_a += tl.dot(d_low, _columns(A, F, c, C, f, F), input_precision=PRECISION)
        d_g = d_a * u * slope
        _store_tokens(DG, d_g, block, tokens, f, F, K2)
        if HAS_HG:
            d_hg += tl.dot(d_g.to(bg.dtype), tl.trans(bg), input_precision=PRECISION)
        if GATED:
            d_u = d_a * act
            _store_tokens(DU, d_u, block, tokens, f, F, K2)
            if HAS_HU:
                d_hu += tl.dot(d_u.to(bu.dtype), tl.trans(bu), input_precision=PRECISION)
    part = tl.program_id(1).to(tl.int64) * tokens * K + pair
    tl.store(DW + part, d_w, mask=real)
    mask = real[:, None] & (c < C)[None, :]
    if HAS_HG:
        tl.store(DHG + part[:, None] * C + c[None, :], d_hg, mask=mask)
    if HAS_HU:
        tl.store(DHU + part[:, None] * C + c[None, :], d_hu, mask=mask)


@triton.jit
def _backward_weights(
    G, U, Hg, Hu, Bg, Bu, W, A, DZ, DLOW, DBG, DBU, DA,
    tokens, F, C, stride_g, stride_u, stride_bg, stride_bu, steps,
    K: tl.constexpr, K2: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, GATED: tl.constexpr,
    HAS_HG: tl.constexpr, HAS_HU: tl.constexpr, HAS_A: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of Bg, Bu and A [parts, C, F], of BF columns and one part of the tokens."""
    c = tl.arange(0, BC)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    bg = _columns(Bg, stride_bg, c, C, f, F) if HAS_HG else None
    bu = _columns(Bu, stride_bu, c, C, f, F) if HAS_HU else None
    matrix = _columns(A, F, c, C, f, F) if HAS_A else None
    d_bg = tl.zeros((BC, BF), tl.float32)
    d_bu = tl.zeros((BC, BF), tl.float32)
    d_matrix = tl.zeros((BC, BF), tl.float32)
    for step in range(steps):
        t, pair, real = _place(tl.program_id(1) * steps + step, tokens, K, K2, ROWS)
        hg = _rows(Hg, pair, real, c, C) if HAS_HG else None
        hu = _rows(Hu, pair, real, c, C) if HAS_HU else None
        act, slope, u = _pairs(
            G, U, stride_g, stride_u, hg, hu, bg, bu, t, real, f, F, GATED, HAS_HG, HAS_HU, ACT, PRECISION
        )
        w = tl.load(W + pair, mask=real, other=0.0).to(tl.float32)
        d_a = _of_tokens(DZ, F, t, real, f, F) * w[:, None]
        if HAS_A:
            d_low = _rows(DLOW, pair, real, c, C)
            d_a += tl.dot(d_low, matrix, input_precision=PRECISION)
            d_matrix += tl.dot(tl.trans(d_low), (act * u).to(d_low.dtype), input_precision=PRECISION)
        if HAS_HG:
            d_bg += tl.dot(tl.trans(hg), (d_a * u * slope).to(hg.dtype), input_precision=PRECISION)
        if HAS_HU:
            d_bu += tl.dot(tl.trans(hu), (d_a * act).to(hu.dtype), input_precision=PRECISION)
    at = (tl.program_id(1).to(tl.int64) * C + c)[:, None] * F + f[None, :]
    mask = (c < C)[:, None] & (f < F)[None, :]
    if HAS_HG:
        tl.store(DBG + at, d_bg, mask=mask)
    if HAS_HU:
        tl.store(DBU + at, d_bu, mask=mask)
    if HAS_A:
        tl.store(DA + at, d_matrix, mask=mask)


# --- launching --------------------------------------------------------------------------------------------------------


class _Launch:
    """What all three kernels share: sizes, strides and flags of one call."""

    def __init__(self, k: int, act: str, tensors: tuple[Any, ...]) -> None:
        G, U, _, _, Bg, Bu, _, A = self.tensors = tensors
        self.device = G.device
        self.tokens, self.F = G.shape
        self.C = next((m.shape[0] for m in (Bg, Bu, A) if m is not None), 1)
        strides = [0 if x is None else x.stride(0) for x in (G, U, Bg, Bu)]
        self.sizes = (self.tokens, self.F, self.C, *strides)
        self.flags = {
            "K": k, "K2": triton.next_power_of_2(k), "BC": max(16, triton.next_power_of_2(self.C)),
            "GATED": U is not None, "HAS_HG": Bg is not None, "HAS_HU": Bu is not None, "HAS_A": A is not None,
            "ACT": act, "PRECISION": "ieee" if G.dtype == torch.float32 else "tf32",
        }  # fmt: skip

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def by_tokens(self, tile: Tile) -> tuple[tuple[int, int], int]:
        """The grid of a kernel whose programs take a block of tokens and a part of the columns, and its steps."""
        return self._grid(self._token_blocks(tile), triton.cdiv(self.F, tile.columns))

    def by_columns(self, tile: Tile) -> tuple[tuple[int, int], int]:
        """The grid of a kernel whose programs take a block of columns and a part of the tokens, and its steps."""
        return self._grid(triton.cdiv(self.F, tile.columns), self._token_blocks(tile))

    def run(self, kernel: Any, tile: Tile, grid: tuple[int, int], steps: int, *outputs: torch.Tensor | None) -> None:
        """One launch."""
        with torch.cuda.device_of(self.tensors[0]):  # Triton launches on the current device
            kernel[grid](
                *self.tensors, *outputs, *self.sizes, steps, ROWS=self._rows(tile), BF=tile.columns, **self.flags,
                num_warps=tile.warps,
            )  # fmt: skip

    def _grid(self, blocks: int, others: int) -> tuple[tuple[int, int], int]:
        """Blocks × the parts that the other dimension is cut into to keep the device busy, and tiles per part."""
        busy = 4  # Triton's interpreter
        if self.device.type == "cuda":
            busy *= torch.cuda.get_device_properties(self.device).multi_processor_count
        parts = min(others, triton.cdiv(busy, blocks))
        return (blocks, parts), triton.cdiv(others, parts)

    def _token_blocks(self, tile: Tile) -> int:
        return triton.cdiv(self.tokens, self._rows(tile) // self.flags["K2"])

    def _rows(self, tile: Tile) -> int:
        return max(tile.rows, self.flags["K2"])


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: int, act: str, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        launch = _Launch(k, act, tensors)
        G, A = tensors[0], tensors[-1]
        grid, steps = launch.by_tokens(FORWARD)
        z_TF = torch.empty(launch.tokens, launch.F, dtype=G.dtype, device=G.device)
        low = None if A is None else launch.empty(grid[1], launch.tokens * k, launch.C)
        launch.run(_forward, FORWARD, grid, steps, z_TF, low)
        ctx.k, ctx.act = k, act
        ctx.save_for_backward(*tensors)
        return z_TF, None if low is None else low.sum(0).to(G.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_z: torch.Tensor, d_low: torch.Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        G, U, Hg, Hu, Bg, Bu, W, A = tensors
        launch = _Launch(ctx.k, ctx.act, tensors)
        tokens, pairs, F, C = launch.tokens, launch.tokens * ctx.k, launch.F, launch.C
        d_z = d_z.contiguous()
        d_low = None if d_low is None else d_low.contiguous()
        grid, steps = launch.by_tokens(BACKWARD_TOKENS)
        d_G, d_U = (None if x is None else torch.empty(tokens, F, dtype=x.dtype, device=x.device) for x in (G, U))
        d_Hg, d_Hu = (None if H is None else launch.empty(grid[1], pairs, C) for H in (Hg, Hu))
        d_W = launch.empty(grid[1], pairs)
        launch.run(_backward_tokens, BACKWARD_TOKENS, grid, steps, d_z, d_low, d_G, d_U, d_Hg, d_Hu, d_W)
        grid, steps = launch.by_columns(BACKWARD_WEIGHTS)
        d_Bg, d_Bu, d_A = (None if M is None else launch.empty(grid[1], C, F) for M in (Bg, Bu, A))
        launch.run(_backward_weights, BACKWARD_WEIGHTS, grid, steps, d_z, d_low, d_Bg, d_Bu, d_A)
        sums = [
            None if d is None else d.sum(0).to(x.dtype)
            for d, x in zip((d_Hg, d_Hu, d_Bg, d_Bu, d_W, d_A), (Hg, Hu, Bg, Bu, W, A), strict=True)
        ]
        return None, None, d_G, d_U, *sums


def fused_hidden(
    G: torch.Tensor,
    U: torch.Tensor | None,
    H: Both,
    B: Both,
    gates_TK: torch.Tensor,
    A_down: torch.Tensor | None,
    act: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The hidden activation of tokens with K pairs each, by Triton; differentiable once.

    Args:
        G: the activation's input [T, f]. Rows of G, U and B may be views; their last dimension is contiguous.
        U: the factor of its output, or None.
        H: low-rank inputs [P, C] that are added to G and to U, each with its B; or None.
        B: all experts' matrices [C, f], or None.
        gates_TK: the weights of the sum, [T, K].
        A_down: [C, f], or None.
        act: a name of `fused.ACTIVATIONS`.

    Returns:
        z [T, f], and `A_down a` of each pair, [P, C], or None.
    """
    Hg, Hu, A = [None if x is None else x.contiguous() for x in (*H, A_down)]
    return _Hidden.apply(gates_TK.shape[1], act, G, U, Hg, Hu, *B, gates_TK.reshape(-1), A)
