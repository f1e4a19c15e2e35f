"""The kernels of the report, by name: each gives the calls to compile for a setting, the best of which is reported."""

from collections.abc import Callable

from pallas_kernels.report import ours, peers
from pallas_kernels.report.shape import Build, Setting

__all__ = ["KERNELS"]

KERNELS: dict[str, Callable[[Setting], list[Build]]] = {
    "ragged_attention decode": ours.decode_builds,
    "ragged_attention prefill": ours.prefill_builds,
    "kv_write": ours.write_builds,
    "jax ragged_paged_attention": peers.ragged_paged_attention_builds,
    "jax paged_attention": peers.paged_attention_builds,
}
"""Functions that may raise what a kernel raises for a setting that it does not take: NotImplementedError or ValueError."""
