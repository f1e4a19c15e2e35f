"""The TPU kernels behind `jaxpage.paged_attention`, as one of its implementations."""

from pallas_kernels.tpu.implementation import LAYOUT, attend, attend_with_lse, supports, write

__all__ = ["LAYOUT", "attend", "attend_with_lse", "supports", "write"]
