"""The kernels of the report, by name: each gives the calls to compile for a setting, the best of which is reported."""

from collections.abc import Callable

from pallas_kernels.report import gpu, peers, tpu
from pallas_kernels.report.shape import Build, Setting

__all__ = ["KERNELS"]

KERNELS: dict[str, dict[str, Callable[[Setting], list[Build]]]] = {
    "ragged_attention decode": {"tpu": tpu.decode_builds, "gpu": gpu.decode_builds},
    "ragged_attention prefill": {"tpu": tpu.prefill_builds, "gpu": gpu.prefill_builds},
    "kv_write": {"tpu": tpu.write_builds, "gpu": gpu.write_builds},
    "jax ragged_paged_attention": {"tpu": peers.ragged_paged_attention_builds},
    "jax paged_attention": {"tpu": peers.paged_attention_builds},
}
"""By name and platform. The functions may raise what a kernel raises for a setting that it does not take: NotImplementedError or
ValueError."""
