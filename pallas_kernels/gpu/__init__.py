"""The GPU kernels behind `jaxpage.paged_attention`, as one of its implementations."""

from pallas_kernels.gpu.implementation import LAYOUT, attend, supports, write

__all__ = ["LAYOUT", "attend", "supports", "write"]
