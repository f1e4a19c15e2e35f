"""The kernels on the device at hand, against attention in NumPy and float64, on inputs with every trap set.

Blocks are shuffled, slots that hold no token are poisoned, and unused table entries name somebody else's blocks.
"""

import contextlib
import dataclasses
import traceback
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpage
from pallas_kernels import layout

__all__ = ["CASES", "DRY_CASES", "Case", "Problem", "build", "check_case", "oracle"]

TOLERANCES = {"bfloat16": 3e-3, "float16": 1e-3, "int8": 1e-2, "float8_e4m3fn": 2e-2}
"""Largest error that is right, as a part of the largest value, with keys and values as they are stored."""
ROUNDING = {"bfloat16": 0.0, "float16": 0.0, "int8": 0.005, "float8_e4m3fn": 0.065}
"""How far what is stored may be off, as a part of the largest value of a token and head."""
_POISON = 1e9  # in slots that hold no token, where NaN cannot be


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `new` tokens of each sequence are queries (None: decode), the rest of its length is context."""

    lengths: tuple[int, ...]
    new: tuple[int, ...] | None = None
    block_size: int = 16
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: str = "bfloat16"

    @property
    def compute_dtype(self) -> str:
        """Of new keys and values."""
        return self.dtype if jnp.dtype(self.dtype).itemsize > 1 else "bfloat16"

    @property
    def scaled(self) -> bool:
        """Whether tokens are stored with a scale for each head."""
        return jnp.dtype(self.dtype).itemsize == 1


_EDGES = (1, 0, 15, 16, 17, 63, 64, 65, 129, 1000)
_MIXED: dict[str, Any] = {"lengths": (1, 0, 700, 64, 33, 300), "new": (1, 0, 130, 64, 5, 0)}

CASES: Mapping[str, Case] = (
    {f"decode, block {size}": Case(_EDGES, block_size=size) for size in (1, 8, 16, 32, 64, 128)}
    | {f"decode, head_dim {dim}": Case(_EDGES, head_dim=dim) for dim in (64, 80, 96, 256)}
    | {f"decode, {heads}x{group} heads": Case(_EDGES, kv_heads=heads, group=group) for heads, group in ((1, 1), (3, 3), (1, 8), (2, 11))}
    | {f"decode, {dtype}": Case(_EDGES, dtype=dtype) for dtype in ("float16", "int8", "float8_e4m3fn")}
    | {
        "decode, window 100": Case(_EDGES, window=100),
        "decode, window 5, soft cap, sinks": Case(_EDGES, window=5, soft_cap=3.0, sinks=True),
        "decode, one long sequence": Case((20000,), kv_heads=2),
        "decode, 64 sequences": Case(tuple(range(900, 964)), kv_heads=2),
        "prefill": Case((512, 300), (512, 300), kv_heads=2),
        "mixed": Case(**_MIXED, kv_heads=2),
        "mixed, block 64, head_dim 64": Case(**_MIXED, block_size=64, kv_heads=3, group=3, head_dim=64),
        "mixed, window, soft cap, sinks": Case(**_MIXED, kv_heads=2, window=50, soft_cap=3.0, sinks=True),
        "mixed, head_dim 256": Case(**_MIXED, kv_heads=1, head_dim=256),
        "mixed, int8": Case(**_MIXED, kv_heads=2, dtype="int8"),
        "mixed, float8_e4m3fn": Case(**_MIXED, kv_heads=2, dtype="float8_e4m3fn"),
    }
)
"""What is run on a device."""

DRY_CASES: Mapping[str, Case] = {
    "decode": Case((1, 0, 70), kv_heads=1, head_dim=64),
    "decode, window": Case((40, 5), kv_heads=1, group=3, head_dim=64, window=7, sinks=True),
    "mixed": Case((20, 3), (5, 3), kv_heads=1, head_dim=64),
    "decode, int8": Case((20,), kv_heads=1, head_dim=64, dtype="int8"),
}
"""What is run in the interpreter."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arguments of `jaxpage.paged_attention`, and what the pool logically holds after the call."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    keys: np.ndarray  # float32[N, B, K, D]
    values: np.ndarray  # float32[N, B, K, D]


def build(case: Case, seed: int) -> Problem:
    """Draws a problem.

    Raises:
      NotImplementedError: the GPU layout does not hold the case's dtype.
    """
    rng = np.random.default_rng(seed)
    lengths = np.asarray(case.lengths, np.int32)
    counts = np.minimum(lengths, 1) if case.new is None else np.asarray(case.new, np.int32)
    starts = np.arange(len(lengths) + 1) if case.new is None else np.concatenate([[0], np.cumsum(counts)])
    used = -(-lengths // case.block_size)
    num_blocks = int(used.sum()) + 3
    ids = np.split(rng.permutation(np.arange(1, num_blocks)), np.cumsum(used))
    table = rng.integers(0, num_blocks, (len(lengths), int(used.max()) + 1)).astype(np.int32)
    for row, blocks in zip(table, ids, strict=False):
        row[: len(blocks)] = blocks

    def draw(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape), case.compute_dtype), np.float32)

    num_rows = int(starts[-1])
    before, after, new = [], [], []
    for _ in ("keys", "values"):
        pool = np.full((num_blocks, case.block_size, case.kv_heads, case.head_dim), np.nan, np.float32)
        rows = draw(num_rows, case.kv_heads, case.head_dim)
        for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            token = np.arange(length - count)
            pool[table[seq, token // case.block_size], token % case.block_size] = draw(len(token), case.kv_heads, case.head_dim)
        before.append(pool.copy())
        for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            token = np.arange(length - count, length)
            pool[table[seq, token // case.block_size], token % case.block_size] = rows[starts[seq] : starts[seq] + count]
        after.append(pool)
        new.append(rows)
    if case.dtype == "int8":  # which has no NaN
        before = [np.nan_to_num(pool, nan=_POISON) for pool in before]
    keys, values = map(jnp.asarray, before)
    storage = layout.pack(keys, values, "gpu", case.dtype, case.scaled)
    heads = case.kv_heads * case.group
    q = jnp.asarray(draw(num_rows, heads, case.head_dim))  # in float32, so that the result is not rounded
    options = {"scale": case.head_dim**-0.5, "window": case.window, "soft_cap": case.soft_cap}
    options["sinks"] = jnp.asarray(draw(heads)) if case.sinks else None
    integers = (jnp.asarray(table), jnp.asarray(lengths), None if case.new is None else jnp.asarray(starts, jnp.int32))
    return Problem((q, *(jnp.asarray(rows, case.compute_dtype) for rows in new), storage, *integers), options, *after)


def oracle(problem: Problem) -> np.ndarray:
    """float64[T, H, D]: causal attention by its definition, one sequence after another."""
    q, _, _, _, table, lengths, starts = problem.arguments
    q, table, lengths = np.asarray(q, np.float64), np.asarray(table), np.asarray(lengths)
    starts = np.arange(len(lengths) + 1) if starts is None else np.asarray(starts)
    _, block_size, num_kv_heads, _ = problem.keys.shape
    options = problem.options
    out = np.zeros(q.shape)
    for seq, length in enumerate(lengths):
        queries = slice(starts[seq], starts[seq + 1])
        count = starts[seq + 1] - starts[seq]
        if length == 0 or count == 0:
            continue
        token = np.arange(length)
        place = table[seq, token // block_size], token % block_size
        keys, values = (
            np.repeat(np.asarray(pool[place], np.float64), q.shape[1] // num_kv_heads, 1) for pool in (problem.keys, problem.values)
        )
        scores = np.einsum("qhd,thd->hqt", q[queries], keys) * options["scale"]
        if options["soft_cap"] is not None:
            scores = options["soft_cap"] * np.tanh(scores / options["soft_cap"])
        behind = (length - count + np.arange(count))[:, None] - token  # how far a token is behind a query
        seen = (behind >= 0) if options["window"] is None else (behind >= 0) & (behind < options["window"])
        scores = np.where(seen, scores, -np.inf)
        highest = scores.max(-1, keepdims=True)
        sinks = np.full(q.shape[1], -np.inf) if options["sinks"] is None else np.asarray(options["sinks"], np.float64)
        weights = np.exp(scores - highest)
        total = weights.sum(-1, keepdims=True) + np.exp(sinks[:, None, None] - highest)
        out[queries] = np.einsum("hqt,thd->qhd", weights / total, values)
    return out


def check_case(name: str, case: Case, seed: int) -> dict[str, Any]:
    """Runs one case, on a CPU in the interpreter.

    Returns:
      A row whose `state` is right, wrong, refused (the kernels do not take it, and say so) or failed, with the reason.
    """
    row: dict[str, Any] = {"case": name, "tolerance": TOLERANCES[case.dtype], "error": None, "reason": None}
    try:
        problem = build(case, seed)
        with jaxpage.interpret_kernels() if jax.default_backend() == "cpu" else contextlib.nullcontext():
            program = jax.jit(lambda *arguments: jaxpage.paged_attention(*arguments, **problem.options, implementation="gpu"))
            out, storage = jax.block_until_ready(program(*problem.arguments))
    except NotImplementedError as error:
        return row | {"state": "refused", "reason": " ".join(str(error).split())}
    except (ValueError, jax.errors.JaxRuntimeError):  # a kernel that does not compile or run; the others still count
        return row | {"state": "failed", "reason": " ".join(traceback.format_exc().split())[-400:]}
    held = [np.asarray(pool, np.float32) for pool in layout.unpack(storage)]
    stored = all(_is_held(*pools, ROUNDING[case.dtype]) for pools in zip(held, (problem.keys, problem.values), strict=True))
    expected = oracle(dataclasses.replace(problem, keys=held[0], values=held[1]))
    off = float(np.abs(np.asarray(out, np.float64) - expected).max() / np.abs(expected).max())
    right = off <= row["tolerance"] and stored  # NaN is not
    return row | {"error": off, "state": "right" if right else "wrong", "reason": None if stored else "the pool is not as it should be"}


def _is_held(held: np.ndarray, expected: np.ndarray, rounding: float) -> bool:
    """Whether every token is there and nothing else, but for the null block, which masked writes go to."""
    held, expected = held[1:], expected[1:]
    tokens = np.isfinite(expected)
    empty = ~(np.abs(held) < _POISON / 2)
    bound = rounding * np.abs(np.nan_to_num(expected)).max(axis=-1, keepdims=True)
    return bool(np.array_equal(empty, ~tokens) and (np.abs(held - expected) <= bound)[tokens].all())
