"""Brings tiles to a form that the tensor cores take: from 8 bits to 16, and from plain rows to swizzled ones."""

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.primitives import widen
from pallas_kernels.gpu.spec import Spec

__all__ = ["stage"]

_WARP_ROWS = 64  # of the layouts that give each of the four warps rows of its own


def stage(
    spec: Spec,
    kv_tile: Any,  # [tile, 2*D] in shared memory, as it arrived
    staged: Any | None,  # [tile, 2*D] in shared memory
) -> Any:
    """The tile that the tensor cores take. Values are those stored: their scales are not applied."""
    if staged is None:
        return kv_tile
    for start in range(0, 2 * spec.head_dim, spec.arriving_lanes):
        source, target = (ref.at[:, pl.ds(start, spec.arriving_lanes)] for ref in (kv_tile, staged))
        if spec.tile % _WARP_ROWS:  # a shorter tile gives warps no rows of their own: each of them moves all
            source, target, layout = source.T, target.T, plgpu.Layout.MMA_RHS(spec.operand)
        else:
            layout = plgpu.Layout.MMA_ACC(spec.operand)
        target[...] = widen(plgpu.load(source, layout=layout, optimized=False), spec.operand)
    return staged
