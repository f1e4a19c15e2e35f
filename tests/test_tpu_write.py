"""The TPU layout and the kernel that writes into it: what comes back is what went in, to the bit, and nothing else changes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import pairwise
from helpers_tpu import MODES, assert_same_bits, interpreted

from pallas_kernels import layout, tpu

pytestmark = pytest.mark.slow  # minutes in the interpreter

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "int8 scaled", "float8_e4m3fn scaled")
WORDS = {"kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}  # with small blocks: keys and values are the halves of words

FORMATS = [
    *pairwise({"block_size": (1, 2, 8, 16, 32, 64, 128), "kv_heads": (1, 2, 3, 8), "head_dim": (64, 80, 128, 256), "dtype": DTYPES}),
    *({"block_size": size, **WORDS} for size in (1, 2, 4)),
]
BATCHES = ("decode", "ragged")
WRITES = [
    *pairwise({"block_size": (1, 2, 8, 16, 128), "kv_heads": (1, 2, 3), "head_dim": (64, 80, 128, 256), "dtype": DTYPES, "batch": BATCHES}),
    *({"block_size": size, **WORDS, "batch": batch} for size in (1, 4) for batch in BATCHES),
]


def name_of(row: dict) -> str:
    return "{dtype}, block {block_size}, {kv_heads}x{head_dim}".format(**row) + (f", {row['batch']}" if "batch" in row else "")


def draw(*shape: int, dtype: str, seed: int = 0) -> jax.Array:
    """Values in the range that is stored without a scale."""
    factor = 40 if dtype == "int8" else 1
    compute = "bfloat16" if dtype == "bfloat16" else "float32"
    return jnp.asarray(factor * np.random.default_rng(seed).standard_normal(shape), compute)


def pack(keys: jax.Array, values: jax.Array, dtype: str) -> layout.TpuStorage:
    name, _, scaled = dtype.partition(" ")
    return layout.pack(keys, values, "tpu", name, bool(scaled))


def rounding(values: np.ndarray, dtype: str) -> np.ndarray:
    """By how much each value may change when it is stored."""
    name, _, scaled = dtype.partition(" ")
    if name in ("float32", "bfloat16"):
        return np.zeros_like(values)
    largest = np.abs(values).max(-1, keepdims=True)
    if name == "int8":  # half a step, of which the largest value has at least 125: its scale is rounded up
        return np.maximum(largest / 250 if scaled else 0.5, np.abs(values) - 127)
    return np.maximum(np.abs(values) * 2**-4, (largest / 448 if scaled else 1) * 2**-9)  # 3 bits behind the leading one


@pytest.mark.parametrize("row", FORMATS, ids=name_of)
def test_unpacking_gives_back_what_was_packed(row):
    shape = (3, row["block_size"], row["kv_heads"], row["head_dim"])
    keys, values = (draw(*shape, dtype=row["dtype"], seed=seed) for seed in (1, 2))
    storage = pack(keys, values, row["dtype"])
    assert layout.sizes(storage) == shape
    empty = layout.init_storage("tpu", *shape, *storage.form[3:])
    assert jax.tree.map(jnp.shape, empty) == jax.tree.map(jnp.shape, storage) and empty.blocks.dtype == storage.blocks.dtype
    for before, after in zip((keys, values), layout.unpack(storage), strict=True):
        assert after.dtype == before.dtype
        before, after = (np.asarray(array, np.float64) for array in (before, after))
        assert (np.abs(after - before) <= rounding(before, row["dtype"])).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_moves_between_backends(dtype):
    keys = draw(4, 16, 3, 64, dtype=dtype).at[2, 3:].set(jnp.nan)
    there = layout.pack(keys, -keys, "xla")
    moved = layout.pack(*layout.unpack(there), "tpu")
    assert isinstance(moved, layout.TpuStorage)
    for before, after in zip(there, layout.pack(*layout.unpack(moved), "xla"), strict=True):
        assert_same_bits(before, after)


def test_copied_blocks_take_their_scales_along():
    storage = pack(*(draw(6, 8, 3, 64, dtype="int8 scaled", seed=seed) for seed in (1, 2)), "int8 scaled")
    copied = layout.copy_blocks(storage, jnp.asarray([1, 2]), jnp.asarray([4, 99]))
    for before, after in zip(layout.unpack(storage), layout.unpack(copied), strict=True):
        assert_same_bits(after, before.at[4].set(before[1]))


class Batch(NamedTuple):
    """New tokens and where they go: `rows` of them land in `blocks` at `offsets`, the others nowhere."""

    table: np.ndarray
    lengths: np.ndarray
    query_starts: np.ndarray | None
    num_rows: int
    num_blocks: int
    rows: np.ndarray
    blocks: np.ndarray
    offsets: np.ndarray


def draw_batch(block_size: int, decode: bool) -> Batch:
    """Sequences that end everywhere in a block, and all that leads nowhere: the null block, blocks outside the pool, a full table."""
    width = max(2, 72 // block_size)
    room = width * block_size
    lengths = [1, 0, room - 1, room, room + 1, room // 2 + 1, min(37, room), 2, 9, 21, 0]
    counts = [1, 0, 1, 40, 4, 33, 0, 1, 9, 3, 0]
    if decode:
        counts = [min(length, 1) for length in lengths]
    num_blocks = len(lengths) * width + 1
    table = np.random.default_rng(block_size).permutation(np.arange(1, num_blocks)).reshape(-1, width).astype(np.int32)
    for seq, bad in ((5, -1), (7, 0), (8, num_blocks), (9, 2**31 - 1)):
        table[seq, (lengths[seq] - 1) // block_size] = bad
    starts = 2 + np.concatenate([[0], np.cumsum(counts)])  # two rows before the first sequence belong to nobody, nor do two at the end
    slots = []
    for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for back in range(count):
            position = length - count + back
            block = table[seq, position // block_size] if position < room else -1
            if 0 < block < num_blocks:
                slots.append((seq if decode else starts[seq] + back, block, position % block_size))
    num_rows = len(lengths) if decode else int(starts[-1]) + 2
    return Batch(table, np.int32(lengths), None if decode else np.int32(starts), num_rows, num_blocks, *np.transpose(slots))


@functools.cache
def problem_of(index: int) -> tuple[Batch, layout.TpuStorage, list[jax.Array], list[np.ndarray]]:
    """What to write, the storage before, new keys and values, and what the storage then has to hold."""
    row = WRITES[index]
    batch, head = draw_batch(row["block_size"], row["batch"] == "decode"), (row["kv_heads"], row["head_dim"])
    before = [draw(batch.num_blocks, row["block_size"], *head, dtype=row["dtype"], seed=seed) for seed in (1, 2)]
    if row["dtype"] != "int8":  # which has no NaN
        before[0] = before[0].at[::3].set(jnp.nan)  # whole blocks of it
    if row["dtype"] in ("float32", "bfloat16", "float8_e4m3fn"):
        before[1] = before[1].at[..., ::5].set(jnp.nan)  # and single values, which would spoil a scale
    storage = pack(*before, row["dtype"])
    fresh = [draw(batch.num_rows, *head, dtype=row["dtype"], seed=seed) for seed in (3, 4)]
    targets = [np.array(side) for side in layout.unpack(storage)]
    for target, new in zip(targets, layout.unpack(pack(*(side[:, None] for side in fresh), row["dtype"])), strict=True):
        target[batch.blocks, batch.offsets] = np.asarray(new)[batch.rows, 0]
    return batch, storage, fresh, targets


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", range(len(WRITES)), ids=map(name_of, WRITES))
def test_new_tokens_land_in_their_slots(index, mode):
    batch, storage, fresh, targets = problem_of(index)
    after = interpreted(mode, tpu.write, storage, *fresh, *(None if part is None else jnp.asarray(part) for part in batch[:3]))
    for now, target in zip(layout.unpack(after), targets, strict=True):
        assert_same_bits(now, target)
    others = np.setdiff1d(np.arange(batch.num_blocks), batch.blocks)  # with the lanes that hold nothing
    assert_same_bits(np.asarray(after.blocks)[others], np.asarray(storage.blocks)[others])


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_write(mode):
    storage = pack(*(draw(3, 8, 2, 64, dtype="float32", seed=seed) for seed in (1, 2)), "float32")
    fresh = draw(2, 2, 64, dtype="float32")
    after = interpreted(mode, tpu.write, storage, fresh, fresh, jnp.asarray([[1], [0]]), jnp.asarray([0, 5]), None)
    assert_same_bits(after.blocks, storage.blocks)
