"""Bytes of keys and values a second that decode attention reads on the device at hand, beside other implementations.

As in a model, a program attends in several layers, each with blocks or arrays of its own, one after the other: what a layer reads has
been forgotten by the caches when it is read again. Pools hold just the blocks of the sequences, in shuffled order.
"""

import contextlib
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpage
from experiments.device_timing import random_values, seconds_of
from pallas_kernels import gpu, layout

__all__ = ["CONTENDERS", "DRY_POINTS", "POINTS", "Point", "decode_rows", "lower_point", "measure_point"]

_DTYPE = "bfloat16"
_LAYER_BYTES = 256 * 2**20  # of all layers together: more than the caches of any GPU hold
_MEMORY_SHARE = 0.8
_THREADS = 8  # that compile


class Point(NamedTuple):
    """A decode step of one attention layer."""

    shape: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int
    context: int
    block_size: int
    most_layers: int = 16

    @property
    def layer_bytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_dim * jnp.dtype(_DTYPE).itemsize

    @property
    def num_layers(self) -> int:
        """Layers of a program."""
        return min(max(-(-_LAYER_BYTES // self.layer_bytes), 1), self.most_layers)

    @property
    def cached(self) -> bool:
        """Whether a device's caches may hold some of what a program reads, from its last call."""
        return self.num_layers * self.layer_bytes < _LAYER_BYTES


_SHAPES = (("llama-3-8b", 32, 8, 128), ("llama-3-70b/8", 8, 1, 128))
POINTS = tuple(
    Point(*shape, batch, context, block_size)
    for block_size, shape, context, batch in itertools.product((16, 64), _SHAPES, (8192, 32768, 1024), (16, 64, 256, 1))
)
"""What is measured on a device, the most telling first, for time may run out."""
DRY_POINTS = (Point("tiny", 2, 1, 64, 2, 64, 16, most_layers=2),)
"""What is run in the interpreters."""


class Contender(NamedTuple):
    """An implementation of decode attention: one layer's step, and the arrays of keys and values that it reads."""

    attend: Callable[..., jax.Array]
    """(point, q [S, H, D], layer, table [S, M], lengths [S]) -> [S, H, D]"""
    layer: Callable[[Point], Any]
    """A layer's keys and values: a pytree of shapes and dtypes."""
    paged: bool = True
    options: Sequence[dict[str, Any]] = ({},)
    """Arguments of `attend`, the best of which are taken."""
    most_elements: float = math.inf
    """That an array of a layer may have."""


def _paged_layer(point: Point) -> Any:
    sizes = (_num_blocks(point), point.block_size, point.num_kv_heads, point.head_dim)
    return jax.eval_shape(lambda: layout.init_storage("gpu", *sizes, _DTYPE))


def _paged(point: Point, q: jax.Array, layer: Any, table: jax.Array, lengths: jax.Array) -> jax.Array:
    with jaxpage.interpret_kernels() if jax.default_backend() == "cpu" else contextlib.nullcontext():
        return gpu.attend(q, layer, table, lengths, None, scale=point.head_dim**-0.5, window=None, soft_cap=None, sinks=None)


def _triton_layer(point: Point) -> Any:
    pages = jax.ShapeDtypeStruct((point.num_kv_heads, _num_blocks(point), point.block_size, point.head_dim), _DTYPE)
    return pages, pages


def _triton(point: Point, q: jax.Array, layer: Any, table: jax.Array, lengths: jax.Array, **options: Any) -> jax.Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it is measured for that very reason
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    interpret = jax.default_backend() == "cpu"
    return paged_attention(q * jnp.asarray(point.head_dim**-0.5, q.dtype), *layer, table, lengths, interpret=interpret, **options)


def _contiguous_layer(point: Point) -> Any:
    side = jax.ShapeDtypeStruct((point.batch, point.context, point.num_kv_heads, point.head_dim), _DTYPE)
    return side, side


def _dot_product(point: Point, q: jax.Array, layer: Any, table: jax.Array, lengths: jax.Array, **options: Any) -> jax.Array:
    keys, values = layer
    return jax.nn.dot_product_attention(q[:, None], keys, values, key_value_seq_lengths=lengths, **options)[:, 0]


CONTENDERS = {
    "jaxpage": Contender(_paged, _paged_layer),
    # Its offsets have 32 bits; past them it reads wherever they lead.
    "jax triton": Contender(_triton, _triton_layer, options=({"k_splits": 16}, {"k_splits": 2}), most_elements=2**31),
    "cudnn contiguous": Contender(_dot_product, _contiguous_layer, paged=False, options=({"implementation": "cudnn"},)),
    "xla contiguous": Contender(_dot_product, _contiguous_layer, paged=False, options=({"implementation": "xla"},)),
}
"""By name. Contiguous ones have no blocks: they show what a device can do without them."""

_REFUSALS = (NotImplementedError, ValueError, RuntimeError, ImportError, AssertionError)  # how JAX and its kernels say that they cannot


def _num_blocks(point: Point) -> int:
    return 1 + point.batch * _table_width(point)


def _table_width(point: Point) -> int:
    return point.context // point.block_size


def decode_rows(points: Sequence[Point], copy: float, deadline: float, seed: int) -> Iterator[dict[str, Any]]:
    """Measures points one after another; on a CPU, in the interpreters.

    All programs are compiled first, several at a time, for to compile beside a measurement would disturb it.

    Args:
      points: what to measure.
      copy: bytes a second of a plain copy.
      deadline: `time.monotonic()` after which nothing more is begun.
      seed: of the order of the blocks, and of the values.

    Yields:
      A row for each point and contender, with one row for all block sizes of one that has no blocks: bytes_per_second and share (of the
      copy), or None and the reason.
    """
    half = (time.monotonic() + deadline) / 2
    programs: dict[tuple[Point, str], list[Future[jax.stages.Compiled]]] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for point, (name, contender) in itertools.product(points, CONTENDERS.items()):
            key = point if contender.paged else point._replace(block_size=point.context)
            if (key, name) not in programs:
                programs[key, name] = [pool.submit(_compile, key, contender, option, half) for option in contender.options]
    for (point, name), compiled in programs.items():
        seconds, reasons = [], []
        for program in compiled:
            try:
                seconds.append(measure_point(point, CONTENDERS[name], program.result(), deadline, seed))
            except _REFUSALS as error:
                reasons.append(" ".join(str(error).split())[:300] or type(error).__name__)
        row = {**point._asdict(), "contender": name, "layers": point.num_layers, "cached": point.cached}
        if seconds:
            rate = point.layer_bytes / min(seconds)
            yield row | {"seconds": min(seconds), "bytes_per_second": rate, "share": rate / copy, "reason": None}
        else:
            yield row | {"seconds": None, "bytes_per_second": None, "share": None, "reason": reasons[0]}


def lower_point(point: Point, contender: Contender, options: dict[str, Any]) -> jax.stages.Lowered:
    """A program of all layers of a point.

    Raises:
      NotImplementedError: the contender does not take it.
    """
    layer = contender.layer(point)
    if any(leaf.size >= contender.most_elements for leaf in jax.tree.leaves(layer)):
        raise NotImplementedError("counts elements in 32 bits, and there are more")
    step = jax.jit(functools.partial(contender.attend, point, **options))

    def run(q: jax.Array, layers: Sequence[Any], table: jax.Array, lengths: jax.Array) -> jax.Array:
        for layer in layers:
            q = step(q, layer, table, lengths).astype(q.dtype)
        return q

    q = jax.ShapeDtypeStruct((point.batch, point.num_heads, point.head_dim), _DTYPE)
    integers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((point.batch, _table_width(point)), (point.batch,)))
    return jax.jit(run).lower(q, [layer] * point.num_layers, *integers)


def _compile(point: Point, contender: Contender, options: dict[str, Any], deadline: float) -> jax.stages.Compiled:
    if time.monotonic() > deadline:
        raise RuntimeError("out of time")
    return lower_point(point, contender, options).compile()


def measure_point(point: Point, contender: Contender, program: jax.stages.Compiled, deadline: float, seed: int) -> float:
    """Seconds of one layer's step.

    Raises:
      NotImplementedError: the device has too little memory.
      RuntimeError: it is past the deadline.
    """
    if time.monotonic() > deadline:
        raise RuntimeError("out of time")
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if point.layer_bytes * point.num_layers > _MEMORY_SHARE * memory:
        raise NotImplementedError(f"needs {point.layer_bytes * point.num_layers / 1e9:.0f} GB, the device has {memory / 1e9:.0f}")
    layer = contender.layer(point)
    seeds = itertools.count(seed)
    layers = [jax.tree.map(lambda leaf: random_values(leaf, next(seeds)), layer) for _ in range(point.num_layers)]
    table = 1 + np.random.default_rng(seed).permutation(_num_blocks(point) - 1).reshape(point.batch, -1)
    q = random_values(jax.ShapeDtypeStruct((point.batch, point.num_heads, point.head_dim), _DTYPE), next(seeds))
    return seconds_of(program, q, layers, jnp.asarray(table, jnp.int32), jnp.full(point.batch, point.context, jnp.int32)) / point.num_layers
