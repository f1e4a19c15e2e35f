"""The TPU kernels behind `jaxpage.paged_attention`, as one of its implementations."""

from pallas_kernels.tpu.implementation import attend, supports, write

__all__ = ["attend", "supports", "write"]
