"""Plants faults into copies of the GPU kernels, one at a time; see `mutants.py`."""

import sys

from mutants import Fault, fault, main

_DECODE = "tests/test_gpu_attention.py::test_agrees_with_the_oracle"
_PREFILL = "tests/test_gpu_prefill.py::test_agrees_with_the_oracle"
DECODE = f"{_DECODE}[a few tiles]"
SPLITS = f"{_DECODE}[a wide table, so several splits]"
SCALED = f"{_DECODE}[scales of several heads]"
WINDOW = f"{_DECODE}[first token of a tile just out of the window]"
PREFILL = f"{_PREFILL}[tiles that end where the context's tiles do]"
CHUNK = f"{_PREFILL}[a chunk of a few tiles]"
SHORT_TILES = f"{_PREFILL}[queries over three short tiles]"
PREFILL_WINDOW = f"{_PREFILL}[first token of a tile just out of the window]"
PREFILL_SCALED = f"{_PREFILL}[scales of several heads]"
OUTSIDE = "tests/test_attention.py::test_a_block_outside_the_pool_is_neither_read_nor_written[-1-gpu]"
WIDE_HEADS = f"{_PREFILL}[block size 4, wide heads]"

MASK = "        values = jnp.where(token < context.end, values, jnp.zeros((), dtype))\n"
WAIT = "            plgpu.barrier_wait(arrived.at[slot_of(step)])\n"
COPY = "    if exists is True:\n        copy(source, target, arrived)\n"
SLOT = "buffers.tiles.at[slot_of("
SEEN, VISIBLE = "where_seen(scores, token < context.end)", "visible = visible_lengths(block_table, lengths, num_blocks, block_size)"
DECODE_KEYS, DECODE_VALUES = "pl.ds(0, spec.head_dim)", "pl.ds(2 * spec.head_dim - spec.value_rows, spec.value_rows)"
PREFILL_KEYS, PREFILL_VALUES = "plgpu.load(tile.kv.at[:, part].T", "pl.ds(spec.head_dim + part.start, part.size)"

FAULTS = [
    fault("no wait for a tile, decode", DECODE, "walk", WAIT, WAIT.replace("plgpu.barrier_wait(", "id(")),
    fault("no wait for a tile, prefill", CHUNK, "walk", WAIT, WAIT.replace("plgpu.barrier_wait(", "id(")),
    fault("no commit before a slot is filled again", DECODE, "walk", "plgpu.commit_smem()", "pass"),
    fault("a copy dropped", DECODE, "walk", COPY, COPY.replace("copy(source, target, arrived)", "plgpu.barrier_arrive(arrived)")),
    fault("copies into the live slot", DECODE, "walk", f"{SLOT}step)], number", f"{SLOT}step + 1)], number"),
    fault("last block dropped, decode", DECODE, "walk", "lax.div(jnp.maximum(end - 1, 0), ", "-1 + lax.div(jnp.maximum(end - 1, 0), "),
    fault("last block dropped, prefill", CHUNK, "walk", "lax.div(jnp.maximum(end - 1, 0), ", "-1 + lax.div(jnp.maximum(end - 1, 0), "),
    fault("last piece not copied", DECODE, "walk", "number <= walk.last)", "number < walk.last)"),
    fault("a tile is full one token early", SHORT_TILES, "walk", "jnp.maximum(full_end - start", "jnp.maximum(full_end + 1 - start"),
    fault("a tile lost between two splits", SPLITS, "walk", "(number, number + 1)", "(number + 1, number + 1)"),
    fault("block of another sequence", DECODE, "walk", "paged.table.at[seq]", "paged.table.at[0]"),
    fault("values of the tail not masked, decode", DECODE, "decode_kernel", MASK, ""),
    fault("values of the tail not masked, prefill", CHUNK, "prefill_kernel", MASK, ""),
    fault("scores of the tail not masked", DECODE, "decode_kernel", SEEN, "scores"),
    fault("a query does not see itself, decode", DECODE, "decode_kernel", SEEN, SEEN.replace("token", "token + 1")),
    fault("a query does not see itself, prefill", PREFILL, "prefill_kernel", "jnp.minimum(position + 1,", "jnp.minimum(position,"),
    fault("a query sees the next token", PREFILL, "prefill_kernel", "jnp.minimum(position + 1,", "jnp.minimum(position + 2,"),
    fault("a window one token too wide, decode", WINDOW, "decode_kernel", "token >= context.first)", "token >= context.first - 1)"),
    fault("a window one token too wide, prefill", PREFILL_WINDOW, "prefill_kernel", "token > lax.broad", "token >= lax.broad"),
    Fault(
        "keys and values swapped, decode",
        DECODE,
        (
            ("decode_kernel", DECODE_KEYS, "pl.ds(spec.head_dim, spec.head_dim)"),
            ("decode_kernel", DECODE_VALUES, "pl.ds(0, spec.value_rows)"),
        ),
    ),
    Fault(
        "keys and values swapped, prefill",
        CHUNK,
        (
            ("prefill_kernel", PREFILL_VALUES, "part"),
            ("prefill_kernel", PREFILL_KEYS, "plgpu.load(tile.kv.at[:, pl.ds(spec.head_dim + part.start, part.size)].T"),
        ),
    ),
    fault("results so far do not decay", CHUNK, "softmax", "state.total * decay", "state.total"),
    fault("scale of another head, decode", SCALED, "walk", "2 * head + side", "side"),
    fault("scale of another head, prefill", PREFILL_SCALED, "walk", "2 * head + side", "side"),
    fault("scale of the key for the value", SCALED, "walk", "2 * head + side", "2 * head"),
    fault("scales of the tail not masked", SCALED, "decode_kernel", "weights = jnp.where(token < context.end, weights, 0.0)", "pass"),
    fault("scales not written", SCALED, "implementation", "scales = storage.scales.at", "storage.scales.at"),
    fault("half a tile not staged", WIDE_HEADS, "staging", "range(0, 2 * spec.head_dim,", "range(0, spec.head_dim,"),
    fault("rows of another tile", CHUNK, "work", "* group + offset, first", "* group, first"),
    fault("blocks outside the pool are read", OUTSIDE, "implementation", VISIBLE, "visible = lengths"),
]

if __name__ == "__main__":
    sys.exit(main(FAULTS, "gpu", ("",), sys.argv[1:]))
