"""The GPU prefill kernel in its interpreter: prompts, chunks of them, drafts and mixed batches, over all that a call can vary.

Every case runs with race detection, NaN in every slot that holds no token, and shuffled blocks.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Problem, build, pairwise
from helpers_gpu import TOLERANCE, assert_close, attend, case_of, check, expected, levels

from pallas_kernels import layout
from pallas_kernels.gpu.prefill import ragged_prefill
from pallas_kernels.gpu.spec import Spec
from pallas_kernels.gpu.work import cut

pytestmark = pytest.mark.slow  # minutes in the interpreter

BATCHES = {  # tiles are 64 tokens, or 32, and 64 query rows: one for each query head that shares a kv head
    "prompts": {"lengths": (33, 0, 16, 1), "new": (33, 0, 16, 1)},
    "chunks": {"lengths": (150, 64, 33), "new": (30, 1, 5)},
    "drafts": {"lengths": (130, 63, 9), "new": (4, 4, 4)},
    "mixed": {"lengths": (129, 0, 128, 20, 9, 64), "new": (3, 0, 1, 7, 0, 1), "padding": 5},
}

LEVELS = levels("batch", BATCHES)
ROWS = pairwise(LEVELS)
CASES = {
    "{storage}, {batch}, block {block_size}, head_dim {head_dim}, {kv_heads}x{group} heads, window {window}".format(**row): case_of(
        row, "batch", BATCHES
    )
    for row in ROWS
} | {
    "block size 1": Case((65, 7, 0), new=(3, 7, 0), block_size=1, dtype="bfloat16", kv_heads=1, head_dim=64),
    "block size 4, wide heads": Case((70,), new=(3,), block_size=4, dtype="int8", scaled=True, kv_heads=1, head_dim=256),
    "many query heads": Case((70, 3), new=(3, 2), dtype="bfloat16", kv_heads=1, group=71, head_dim=64),
    "a chunk of a few tiles": Case((330, 0, 70), new=(5, 0, 40), dtype="bfloat16", head_dim=64, kv_heads=1),
    "first token of a tile just out of the window": Case((301, 130), new=(2, 1), window=173, dtype="bfloat16", kv_heads=1, head_dim=64),
    "scales of several heads": Case((150, 0, 65), new=(2, 0, 9), dtype="int8", scaled=True, kv_heads=2, group=3, head_dim=64),
    "queries over three short tiles": Case((94,), new=(64,), dtype="bfloat16", kv_heads=1, group=1, head_dim=256),
    "a prompt of several tiles": Case((200,), new=(200,), dtype="bfloat16", kv_heads=1, group=2, head_dim=64),
    "head_dim of a padded head": Case((70, 5), new=(9, 5), dtype="bfloat16", head_dim=8),
    "no query at all": Case((40, 0), new=(0, 0), padding=3, dtype="bfloat16", head_dim=64),
    "tiles that end where the context's tiles do": Case((128, 64, 127, 65), new=(64, 64, 63, 64), dtype="bfloat16", group=1, head_dim=64),
    "a window far behind": Case((300, 280), new=(40, 1), window=70, dtype="bfloat16", kv_heads=1, head_dim=64),
}


def test_every_two_levels_meet():
    for (a, levels_of_a), (b, levels_of_b) in itertools.combinations(LEVELS.items(), 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(levels_of_a, levels_of_b))


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name):
    check(CASES[name], seed=len(name))


def test_the_result_has_the_dtype_of_the_queries():
    problem = build(Case((70, 5), new=(9, 5), dtype="bfloat16", head_dim=64), backend="gpu")
    out, _ = attend(problem, jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert_close(out, expected(problem), 5e-3)


def test_tiles_outside_the_window_are_not_read():
    problem = build(Case((300,), new=(20,), block_size=8, window=100, dtype="bfloat16", head_dim=64), backend="gpu")
    q, k, v, storage, table, lengths, starts = problem.arguments
    hidden = table[0, : (300 - 20 - 100 + 1) // 8]
    storage = layout.GpuStorage(storage.blocks.at[hidden].set(jnp.nan), storage.head_dim)
    out, _ = attend(Problem((q, k, v, storage, table, lengths, starts), problem.options, None, None))
    assert_close(out, expected(problem), TOLERANCE["bfloat16"])


def test_a_context_ends_before_a_block_outside_the_pool():
    problem = build(Case((100, 40), new=(20, 40), dtype="bfloat16", head_dim=64), backend="gpu")
    q, k, v, storage, table, lengths, starts = problem.arguments
    broken = Problem((q, k, v, storage, table.at[0, 5].set(1000), lengths, starts), problem.options, None, None)
    out, after = attend(broken)
    keys, values = layout.unpack(after)
    target = expected(problem)
    for row in range(20):  # tokens 80 to 99: none of them sees beyond token 79
        shorter = Problem((q[row : row + 1], None, None, None, table[:1], jnp.asarray([80]), None), problem.options, keys, values)
        target[row] = expected(shorter)[0]
    assert_close(out, target, TOLERANCE["bfloat16"])


def test_a_mixed_batch_gives_each_sequence_what_it_gets_alone():
    problem = build(Case((150, 0, 70, 9), new=(1, 0, 33, 9), dtype="bfloat16", kv_heads=1, head_dim=64), backend="gpu")
    together = np.asarray(attend(problem)[0])
    q, k, v, _, table, lengths, starts = problem.arguments
    for seq in (0, 2, 3):
        rows, part = slice(int(starts[seq]), int(starts[seq + 1])), slice(seq, seq + 1)
        alone = (q[rows], k[rows], v[rows], problem.arguments[3], table[part], lengths[part], jnp.asarray([0, rows.stop - rows.start]))
        np.testing.assert_array_equal(together[rows], attend(Problem(alone, problem.options, None, None))[0])


def test_work_is_cut_into_tiles_without_gaps():
    lengths, counts, group = np.asarray([100, 0, 7, 80]), np.asarray([50, 0, 1, 2]), 3
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    tiles, places = cut(jnp.asarray(lengths), jnp.asarray(lengths), starts, num_queries=60, group=group, window=None)
    assert tiles.seq.shape == (4 + 60 * 3 // 64,)
    np.testing.assert_array_equal(tiles.end, [72, 93, 100, 7, 80, 0])  # of 150 rows: 64, 64 and 22
    np.testing.assert_array_equal(tiles.full_end, [51, 72, 93, 7, 79, 0])
    np.testing.assert_array_equal(tiles.seq[:5], [0, 0, 0, 2, 3])
    np.testing.assert_array_equal(tiles.row[:5], [0, 64, 128, 150, 153])
    np.testing.assert_array_equal(np.asarray(tiles.row)[places.tile[:159]] + places.slot[:159], np.arange(159))
    np.testing.assert_array_equal(places.tile[159:], [-1] * 21)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "tile"),
    [(64, 8, "bfloat16", 64), (80, 16, "float16", 64), (96, 64, "float8_e4m3fn", 64), (128, 1, "int8", 64), (256, 32, "int8", 32)],
)
def test_lowers_for_a_gpu(head_dim, block_size, dtype, tile):
    """Layouts, transfers and shapes of the tensor cores are checked there, and nowhere in the interpreter."""
    spec = Spec(block_size, head_dim, dtype, tile, 2, 0.1, 5.0, 50, True)
    storage = jax.eval_shape(lambda: layout.init_storage("gpu", 9, block_size, 3, head_dim, dtype, dtype == "int8"))
    integers = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((2, 7), (2,), (2,), (3,))]
    arguments = [jax.ShapeDtypeStruct((30, 12, head_dim), "bfloat16"), storage, *integers]
    lowered = jax.jit(lambda *a: ragged_prefill(*a, spec, jnp.bfloat16)).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
