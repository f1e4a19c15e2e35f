"""Paged attention: one entry point, and the choice of what runs it."""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from types import ModuleType

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import contiguous, gpu, layout, ragged, reference, tpu, validate, xla
from pallas_kernels.interpret import interpret_kernels

__all__ = ["IMPLEMENTATIONS", "backend_of", "debug_checks", "interpret_kernels", "paged_attention", "query_positions", "supports"]

IMPLEMENTATIONS: dict[str, ModuleType] = {"tpu": tpu, "gpu": gpu, "xla": xla, "contiguous": contiguous, "reference": reference}
"""Modules with `LAYOUT`, `supports`, `write` and `attend`, the most preferred first."""

_debug: contextvars.ContextVar[bool] = contextvars.ContextVar("debug_checks", default=False)


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Within this context, values in tables and lengths are checked too, not only shapes.

    A broken value raises ValueError, or JaxRuntimeError with the same text from inside a program that was traced in this context.
    Outside it, whatever lies outside the pool or the table is left out of the result.
    """
    token = _debug.set(True)
    try:
        yield
    finally:
        _debug.reset(token)


def backend_of(implementation: str) -> str:
    """The backend whose layout an implementation runs on, for `init_cache`.

    Raises:
      NotImplementedError: there is no such implementation; lists those there are.
    """
    return _named(implementation).LAYOUT


def _named(implementation: str) -> ModuleType:
    if implementation not in IMPLEMENTATIONS:
        raise NotImplementedError(f"no attention implementation {implementation!r}; there are: {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[implementation]


def supports(
    implementation: str, storage: layout.Storage, *, num_heads: int, num_seqs: int, table_width: int, decode: bool
) -> tuple[bool, str]:
    """Whether an implementation can run a call, and if not why.

    Args:
      implementation: a key of `IMPLEMENTATIONS`.
      storage: one layer's storage.
      num_heads: query heads (H).
      num_seqs: rows of the block table (S).
      table_width: columns of the block table (M).
      decode: one query a sequence.

    Raises:
      NotImplementedError: there is no such implementation; lists those there are.
    """
    return _named(implementation).supports(storage, num_heads, num_seqs, table_width, decode)


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    storage: layout.Storage,
    block_table: Int[Array, "S M"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"] | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    kv_scales: Float[Array, "2"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], layout.Storage]:
    """Writes new keys and values into their blocks, then lets each query attend causally to its sequence (Kwon et al., 2023).

    Args:
      q: queries of all sequences, one sequence after another; a sequence's queries are its last tokens.
      k: keys of the same tokens.
      v: values of the same tokens.
      storage: one layer's blocks.
      block_table: the blocks of each sequence in order. Block 0 is the null block; it and ids outside the pool are never read: the
        context ends there.
      lengths: tokens each sequence holds after the write; 0 for a sequence that takes no part.
      query_starts: sequence s owns rows query_starts[s] to query_starts[s + 1] of q. None: decode, row s is sequence s.
      scale: factor of the scores, usually D ** -0.5.
      window: a query sees its last `window` tokens, itself included; None: all.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap); None: as they are.
      sinks: a score for each head that takes part in the softmax without a value.
      kv_scales: keys are stored divided by the first number and values by the second: for 8-bit storage without scales of its own.
      implementation: a key of `IMPLEMENTATIONS`; None picks the first that supports the call.

    Returns:
      (out, storage): zeros in rows that belong to no sequence, and the storage with the new tokens in it.

    Raises:
      ValueError: an argument of the wrong shape, dtype or range, by name; in debug mode also bad values in the table.
      NotImplementedError: the named implementation cannot run this call; says why.
    """
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    validate.static(q, k, v, storage, block_table, lengths, query_starts, scale, window, soft_cap, sinks, kv_scales)
    if _debug.get():
        _check_values(storage, block_table, lengths, query_starts, q.shape[0])
    chosen = _choose(implementation, storage, q.shape[1], block_table.shape, query_starts is None)
    attend = functools.partial(chosen.attend, **options)
    if kv_scales is None:
        storage = chosen.write(storage, k, v, block_table, lengths, query_starts)
        return attend(q, storage, block_table, lengths, query_starts), storage
    key_scale, value_scale = kv_scales.astype("float32")
    storage = chosen.write(storage, k / key_scale, v / value_scale, block_table, lengths, query_starts)
    out = attend(q * key_scale, storage, block_table, lengths, query_starts) * value_scale
    return out.astype(q.dtype), storage


def query_positions(lengths: Int[Array, " S"], query_starts: Int[Array, " S+1"] | None, num_queries: int) -> Int[Array, " T"]:
    """Position in its sequence of each query row, 0 for padding rows."""
    return jax.numpy.maximum(ragged.query_places(lengths, query_starts, num_queries)[1], 0)


def _check_values(storage: layout.Storage, block_table: Array, lengths: Array, query_starts: Array | None, num_queries: int) -> None:
    held = layout.sizes(storage)
    check = functools.partial(validate.dynamic, num_blocks=held.num_blocks, block_size=held.block_size, num_queries=num_queries)
    arrays = (block_table, lengths, query_starts)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        jax.debug.callback(check, *arrays)
    else:
        check(*arrays)


def _choose(implementation: str | None, storage: layout.Storage, num_heads: int, table_shape: tuple[int, ...], decode: bool) -> ModuleType:
    num_seqs, table_width = table_shape
    reasons = []
    for name in [implementation] if implementation is not None else IMPLEMENTATIONS:
        able, reason = supports(name, storage, num_heads=num_heads, num_seqs=num_seqs, table_width=table_width, decode=decode)
        if able:
            return IMPLEMENTATIONS[name]
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError("no attention implementation supports this call; " + "; ".join(reasons))
