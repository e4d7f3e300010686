"""Quantised weights as they lie in safetensors files, back to fp32: one function a format, some rows at a time.

A function takes the stored parts of one weight and returns `(start, stop) -> rows [stop - start, in] fp32`, so that a
device's share of a large weight costs no more host memory than it has rows. Nibbles are packed eight to an int32, the
first in the lowest bits, in all three int4 formats; AWQ orders them differently.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int, Shaped

Rows = Callable[[int, int], Float[np.ndarray, "r i"]]

# AWQ ("gemm"): nibble i of a word holds column _AWQ_ORDER[i] of its eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: Int[np.ndarray, "r c"], bits: int) -> Int[np.ndarray, "r n"]:
    """The unsigned values packed along the last axis, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return fields.astype(np.int32).reshape(*words.shape[:-1], -1)


def fp8_blocks(
    weight: Shaped[np.ndarray, "o i"], scales: Float[np.ndarray, "ob ib"], block: tuple[int, int]
) -> Rows:
    """e4m3 values times the scale of their block (DeepSeek-V3, arXiv 2412.19437, section 3.3; `weight_scale_inv`)."""
    high, wide = block

    def rows(start: int, stop: int) -> Float[np.ndarray, "r i"]:
        own = scales[np.arange(start, stop) // high].astype(np.float32)
        return weight[start:stop].astype(np.float32) * np.repeat(own, wide, axis=1)[:, : weight.shape[1]]

    return rows


def pack_quantized(
    packed: Int[np.ndarray, "o w"],
    scales: Float[np.ndarray, "o g"],
    zeros: Int[np.ndarray, "z g"] | None,
    groups: Int[np.ndarray, " i"],
    bits: int,
) -> Rows:
    """compressed-tensors "pack-quantized": offset-binary integers packed along a row, a scale for each group of a row.

    Args:
      packed: weights; `bits` bits each, stored plus 2^(bits − 1).
      scales: of each row's groups.
      zeros: zero points, stored as the weights are but packed along the rows of `scales`; None where all are 0.
      groups: the group of each column.
      bits: 4 or 8.
    """
    columns, offset = len(groups), 1 << (bits - 1)
    points = None if zeros is None else unpack(np.ascontiguousarray(zeros.T), bits).T[: len(scales)] - offset

    def rows(start: int, stop: int) -> Float[np.ndarray, "r i"]:
        values = unpack(packed[start:stop], bits)[:, :columns] - offset
        if points is not None:
            values = values - points[start:stop][:, groups]
        return values.astype(np.float32) * scales[start:stop].astype(np.float32)[:, groups]

    return rows


def awq(
    qweight: Int[np.ndarray, "i ow"],
    qzeros: Int[np.ndarray, "g ow"],
    scales: Float[np.ndarray, "g o"],
    groups: Int[np.ndarray, " i"],
) -> Rows:
    """AWQ's "gemm" layout: (q − z) · s, [in, out], packed along the outputs in AWQ's order."""
    order = np.argsort(_AWQ_ORDER)

    def columns(words: Int[np.ndarray, "n ow"], start: int, stop: int) -> Int[np.ndarray, "n r"]:
        first = start // 8
        values = unpack(np.ascontiguousarray(words[:, first : -(-stop // 8)]), 4)
        values = values.reshape(len(words), -1, 8)[..., order].reshape(len(words), -1)
        return values[:, start - 8 * first : stop - 8 * first]

    def rows(start: int, stop: int) -> Float[np.ndarray, "r i"]:
        centred = columns(qweight, start, stop) - columns(qzeros, start, stop)[groups]
        return (centred.astype(np.float32) * scales[:, start:stop].astype(np.float32)[groups]).T

    return rows


def gptq(
    qweight: Int[np.ndarray, "iw o"],
    qzeros: Int[np.ndarray, "g ow"],
    scales: Float[np.ndarray, "g o"],
    groups: Int[np.ndarray, " i"],
    zero_offset: int,
) -> Rows:
    """GPTQ's layout: (q − z) · s, [in, out], weights packed along the inputs and zero points along the outputs.

    Args:
      groups: the group of each input (`g_idx`).
      zero_offset: 1 in the format "gptq", which stores z − 1 (modulo 16); 0 in "gptq_v2".
    """

    def rows(start: int, stop: int) -> Float[np.ndarray, "r i"]:
        values = unpack(np.ascontiguousarray(qweight[:, start:stop].T), 4)
        first = start // 8
        zeros = unpack(np.ascontiguousarray(qzeros[:, first : -(-stop // 8)]), 4)
        zeros = (zeros[:, start - 8 * first : stop - 8 * first] + zero_offset) & 15
        return (values - zeros[groups].T).astype(np.float32) * scales[:, start:stop].astype(np.float32)[groups].T

    return rows
