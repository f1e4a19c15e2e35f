"""What the report measures: kernels, targets, model shapes, block sizes and dtypes, and which of their combinations."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pallas_kernels.report.kernels import KERNELS
from pallas_kernels.report.shape import Shape
from pallas_kernels.targets import TARGETS

__all__ = ["SHAPES", "Case", "Shape", "select_cases"]

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", 9, 3, 64),
        Shape("llama-3.2-1b", 32, 8, 64),
        Shape("llama-3-8b", 32, 8, 128),
        Shape("llama-3-70b/8", 8, 1, 128),  # one of eight shards
        Shape("qwen3-32b", 64, 8, 128),
        Shape("gemma-3-27b", 32, 16, 128, window=1024),
    )
}
"""The attention layers of models, by name."""

_USUAL_SHAPE, _USUAL_BLOCK_SIZE, _USUAL_DTYPE = "llama-3-8b", 16, "bfloat16"
_BLOCK_SIZES = (1, 8, 16, 64, 128)
_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
_QUICK_TARGETS, _QUICK_SHAPES = ("v6e", "tpu7x", "h100", "b200"), ("smollm2-135m", "llama-3-8b")


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation of the report, by the names of its parts."""

    kernel: str
    target: str
    shape: str
    block_size: int
    kv_dtype: str


def select_cases(
    targets: Sequence[str] = (), kernels: Sequence[str] = (), shapes: Sequence[str] = (), *, quick: bool = False
) -> list[Case]:
    """The report's cases, target by target.

    All shapes come with blocks of 16 and bfloat16; the other block sizes and dtypes with one shape, so that each axis shows once.

    Args:
      targets: only these; none: all. A platform, "tpu" or "gpu", stands for all of its targets.
      kernels: only these; none: all. A target has those that there are for its platform.
      shapes: only these; none: all.
      quick: only the newest two targets of each platform and two shapes, with blocks of 16 and bfloat16.

    Raises:
      ValueError: a name is not known.
    """
    platforms = dict.fromkeys(target.platform for target in TARGETS.values())
    targets = _chosen("target", targets, TARGETS | platforms, platforms)
    of_platforms = [name for name in (_QUICK_TARGETS if quick else TARGETS) if TARGETS[name].platform in targets]
    kernels = _chosen("kernel", kernels, KERNELS, KERNELS)
    shapes = _chosen("shape", shapes, SHAPES, _QUICK_SHAPES if quick else SHAPES)
    variants = [(shape, _USUAL_BLOCK_SIZE, _USUAL_DTYPE) for shape in shapes]
    if _USUAL_SHAPE in shapes and not quick:
        variants += [(_USUAL_SHAPE, block_size, _USUAL_DTYPE) for block_size in _BLOCK_SIZES]
        variants += [(_USUAL_SHAPE, _USUAL_BLOCK_SIZE, dtype) for dtype in _DTYPES]
    variants = list(dict.fromkeys(variants))
    cases = [
        Case(kernel, name, *variant)
        for name, target in TARGETS.items()
        if name in targets or name in of_platforms
        for variant in variants
        for kernel in kernels
        if target.platform in KERNELS[kernel]
    ]
    if not cases:
        raise ValueError(f"there is no {', '.join(kernels)} for {', '.join(targets)}")
    return cases


def _chosen(what: str, names: Sequence[str], known: Mapping[str, Any], default: Iterable[str]) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise ValueError(f"no {what} {name!r}; known are: {', '.join(known)}")
    return names or tuple(default)
