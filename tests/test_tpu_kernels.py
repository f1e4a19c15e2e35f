"""The TPU implementation beside plain attention: log-sum-exp, several cores, and what it refuses.

Where the rest is tested in the interpreter: blocks outside the pool, positions beyond the table, NaN in the tail of a row, batched against
alone in `test_attention`; pairs of all sizes, head counts, options and dtypes, rows of length zero and prompts behind a context in
`test_tpu_attention_on_wait` and `test_tpu_attention_eager`; the write alone in `test_tpu_write`. Pools beyond 2**31 elements need no test
of their own: the kernels address whole blocks by their number, never elements by an offset.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Problem, build
from helpers_tpu import MODES, TOLERANCE, expected, interpreted, relative_error, stored
from oracle import paged_attention as oracle

import jaxpage
from pallas_kernels import layout
from pallas_kernels.ragged import visible_lengths
from pallas_kernels.tiles import TpuLimits
from pallas_kernels.tpu import implementation
from pallas_kernels.tpu.attention import ragged_attention

DECODE = {"lengths": (1, 0, 128, 129, 290)}
MIXED = {"lengths": (1, 0, 150, 60, 140), "new": (1, 0, 1, 9, 40), "padding": 3}

CASES = {
    "decode": Case(**DECODE, head_dim=64),
    "mixed": Case(**MIXED, head_dim=128, group=3),
    "mixed with all options": Case(**MIXED, head_dim=64, kv_heads=3, window=37, soft_cap=3.0, sinks=True),
    "decode with sinks": Case(**DECODE, head_dim=128, sinks=True, dtype="bfloat16"),
    "decode in 8 bits": Case(**DECODE, head_dim=128, dtype="int8", scaled=True),
}


def problem_of(case: Case) -> Problem:
    return build(case, seed=7, backend="tpu")


def attend_with_lse(mode: str, problem: Problem, *changed) -> tuple[jax.Array, jax.Array]:
    """Over the storage after the write. `changed`: other tables and lengths."""
    q, _, _, _, *places = problem.arguments
    options = {"sinks": None, **problem.options}
    attend = functools.partial(implementation.attend_with_lse, **options)
    return interpreted(mode, attend, q, problem.after, *(changed or places))


def log_sum_exp(case: Case, problem: Problem) -> np.ndarray:
    """From the oracle: beside a sink with score 0, whose weight is 1, values of 1 give the share Z / (Z + 1), where Z is the sum sought."""
    keys, _ = stored(case, problem)
    q, _, _, _, *places = problem.arguments
    num_heads = q.shape[1]
    share = oracle(q, keys, np.ones_like(keys), *places, **problem.options | {"sinks": np.zeros(num_heads)})[..., 0]
    with np.errstate(divide="ignore"):
        scores = np.log(share) - np.log1p(-share)
    sinks = np.asarray(problem.options.get("sinks", np.full(num_heads, -np.inf)), np.float64)
    return np.where(share > 0, np.logaddexp(scores, sinks[None]), -np.inf)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_log_sum_exp_agrees_with_the_oracle(name, mode):
    case, problem = CASES[name], problem_of(CASES[name])
    out, lse = attend_with_lse(mode, problem)
    target = log_sum_exp(case, problem)
    assert relative_error(out, expected(problem, *stored(case, problem))) <= TOLERANCE[case.dtype]
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(target))
    seen = ~np.isneginf(target)
    assert seen.any() and not seen.all()
    assert relative_error(lse[seen], target[seen]) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("mode", MODES)
def test_halves_of_a_context_merge_by_their_log_sum_exp(mode):
    """Each half as a table of its own; the second one of sequence 0 is empty."""
    problem = problem_of(Case((5, 128, 129, 290), head_dim=64))
    _, _, _, _, table, lengths, _ = problem.arguments
    cut = 5  # blocks
    first = jnp.minimum(lengths, cut * 16)
    parts = [attend_with_lse(mode, problem, *part, None) for part in ((table[:, :cut], first), (table[:, cut:], lengths - first))]
    outs, scores = (np.stack([np.asarray(part[index], np.float64) for part in parts]) for index in (0, 1))
    assert np.isneginf(scores[1, 0]).all()
    weights = np.exp(scores - np.logaddexp(*scores))
    assert relative_error((weights[..., None] * outs).sum(0), expected(problem, problem.keys, problem.values)) <= TOLERANCE["float32"]


def test_log_sum_exp_of_rows_whose_blocks_are_gone():
    """A sequence that takes part but sees no token: without a sink there is nothing, with one there is only the sink."""
    for case in (Case((20, 40), window=1), Case((20, 40), window=1, sinks=True)):
        problem = problem_of(case)
        _, _, _, _, table, lengths, starts = problem.arguments
        out, lse = attend_with_lse("on_wait", problem, table.at[0, 1].set(-1), lengths, starts)
        assert not np.any(np.asarray(out)[0])
        np.testing.assert_allclose(lse[0], problem.options.get("sinks", np.full(4, -np.inf)), rtol=1e-6)
        np.testing.assert_allclose(lse[1], log_sum_exp(case, problem)[1], rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_see_nothing_beside_rows_that_do(mode):
    """The block of tokens 16 to 19 is gone: the first two queries of the tile still see token 15, the others nothing."""
    problem = problem_of(Case((20, 40), new=(4, 1), window=3, head_dim=64))
    q, _, _, _, table, lengths, starts = problem.arguments
    out, lse = attend_with_lse(mode, problem, table.at[0, 1].set(-1), lengths, starts)
    for row, first in ((0, 14), (1, 15)):
        options = problem.options | {"window": 16 - first}
        target = oracle(q[row : row + 1], problem.keys, problem.values, table[:1], np.asarray([16]), None, **options)
        assert relative_error(out[row : row + 1], target) <= TOLERANCE["float32"]
    assert not np.any(np.asarray(out)[2:4]) and np.isneginf(lse[2:4]).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "case",
    [
        Case(**DECODE, head_dim=64),
        Case((290, 0, 3, 7), head_dim=64, window=37),
        Case((290,), head_dim=64),
        Case(**MIXED, head_dim=128, dtype="bfloat16"),
    ],
    ids=["decode", "little work", "work for one", "mixed"],
)
def test_two_cores_share_the_work(case, mode):
    problem = problem_of(case)
    q, _, _, _, table, lengths, starts = problem.arguments
    form = problem.after.form

    def attend(q, blocks, table, lengths, starts):
        visible = visible_lengths(table, lengths, blocks.shape[0], form.block_size)
        options = {"sinks": None, **problem.options, "chunk_tokens": 128, "tile_queries": 32, "num_cores": 2, "with_lse": True}
        return ragged_attention(q, blocks, form, table, lengths, visible, starts, **options)

    out, lse = interpreted(mode, attend, q, problem.after.blocks, table, lengths, starts, num_cores=2)
    target = log_sum_exp(case, problem)
    seen = ~np.isneginf(target[:, 0])
    assert relative_error(out[seen], expected(problem, *stored(case, problem))[seen]) <= TOLERANCE[case.dtype]
    assert relative_error(lse[seen], target[seen]) <= TOLERANCE[case.dtype]


def storage_of(block_size: int = 16, kv_heads: int = 2, head_dim: int = 64, dtype: str = "bfloat16", scaled: bool = False):
    return layout.init_storage("tpu", 4, block_size, kv_heads, head_dim, dtype, scaled)


def call(storage: layout.Storage, num_heads: int, *, new: int | None = None, **options) -> jax.Array:
    held = layout.sizes(storage)
    num_rows = 1 if new is None else new
    q = jnp.zeros((num_rows, num_heads, held.head_dim), "bfloat16")
    fresh = jnp.zeros((num_rows, held.num_kv_heads, held.head_dim), "bfloat16")
    starts = None if new is None else jnp.asarray([0, new])
    return jaxpage.paged_attention(q, fresh, fresh, storage, jnp.asarray([[1, 2]]), jnp.asarray([num_rows]), starts, scale=1.0, **options)


REFUSED = {
    "head_dim": ({"head_dim": 512}, 2, r"works with head_dim up to 256, not 512"),
    "block size": ({"block_size": 11}, 2, r"works with block sizes 1, 2, 4, 8, .*, not 11"),
    "scaled heads": ({"kv_heads": 33, "dtype": "int8", "scaled": True}, 33, r"works with up to 32 kv heads where each has a scale, not 33"),
}


@pytest.mark.parametrize("implementation_name", ["tpu", None])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_is_refused_with_what_does(name, implementation_name):
    sizes, num_heads, message = REFUSED[name]
    with jaxpage.interpret_kernels(), pytest.raises(NotImplementedError, match=f"no attention implementation .* tpu: {message}"):
        call(storage_of(**sizes), num_heads, implementation=implementation_name)


def test_float16_is_refused_where_the_cache_is_made():
    with pytest.raises(NotImplementedError, match="the tpu layout does not hold float16; it holds: float32, bfloat16, int8, float8_e4m3fn"):
        storage_of(dtype="float16")


def test_another_layout_is_refused():
    with jaxpage.interpret_kernels(), pytest.raises(NotImplementedError, match="tpu: needs the TPU layout, the cache has XlaStorage"):
        call(layout.init_storage("xla", 4, 16, 2, 64, "bfloat16"), 2, implementation="tpu")


def test_without_a_tpu_the_message_names_the_interpreter():
    with pytest.raises(NotImplementedError, match=r"tpu: needs a TPU, this host has cpu; tests run it within jaxpage\.interpret"):
        call(storage_of(), 2)


@pytest.mark.parametrize("new", [None, 2])
def test_heads_that_do_not_fit_the_chip_are_refused(new, monkeypatch):
    monkeypatch.setattr(implementation, "tpu_limits", lambda kind: TpuLimits(3 * 2**20, chunk_tokens=1024, tile_queries=128))
    message = "no tile of 128 heads of 256 fits the 3 MiB of on-chip memory; shard the heads"
    with jaxpage.interpret_kernels():
        with pytest.raises(NotImplementedError, match=f"tpu: {message}"):
            call(storage_of(kv_heads=8, head_dim=256), 128, new=new)
        with pytest.raises(NotImplementedError, match=message):  # called by itself too
            places = (jnp.asarray([[1, 2]]), jnp.asarray([1]), None if new is None else jnp.asarray([0, 1]))
            options = {"scale": 1.0, "window": None, "soft_cap": None, "sinks": None}
            implementation.attend_with_lse(jnp.zeros((1, 128, 256)), storage_of(kv_heads=8, head_dim=256), *places, **options)


@pytest.mark.parametrize("decode", [True, False])
def test_tiles_shrink_before_a_call_is_refused(decode):
    form = storage_of(kv_heads=8, head_dim=256).form
    fits = []
    for size in (64, 32, 16, 12, 8, 6):
        limits = TpuLimits(size * 2**20, chunk_tokens=1024, tile_queries=128)
        if tiles := implementation.choose_tiles(form, 64, limits, decode):
            fits.append(tiles)
            assert implementation.vmem_bytes(form, 64, tiles.chunk_tokens, None if decode else tiles.tile_queries, False) < size * 2**20
    assert len(set(fits)) > 2
    for larger, smaller in itertools.pairwise(fits):
        assert smaller.chunk_tokens <= larger.chunk_tokens and smaller.tile_queries <= larger.tile_queries


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: jnp.zeros((2, 4, 16))}, "q has head_dim 16, the cache holds 32"),
        ({0: jnp.zeros((2, 5, 32))}, "multiple of the cache's 2 kv heads"),
        ({1: jnp.zeros((3, 2, 32))}, "k must have shape"),
        ({2: jnp.zeros((2, 2, 31))}, "v must have shape"),
        ({4: jnp.zeros((2,), jnp.int32)}, "block_table must have shape"),
        ({5: jnp.zeros((3,), jnp.int32)}, "lengths must have shape"),
        ({6: jnp.zeros((2,), jnp.int32)}, "query_starts must have shape"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    arguments = list(build(Case((20, 40)), backend="tpu").arguments)
    for place, value in changes.items():
        arguments[place] = value
    with jaxpage.interpret_kernels(), pytest.raises(ValueError, match=message):
        jaxpage.paged_attention(*arguments, scale=1.0)


def test_debug_checks_name_a_bad_block():
    q, k, v, storage, table, lengths, _ = build(Case((20, 40)), backend="tpu").arguments
    bad = table.at[1, 0].set(999)

    def attend(table):
        return jaxpage.paged_attention(q, k, v, storage, table, lengths, scale=1.0)[0]

    with jaxpage.debug_checks(), jaxpage.interpret_kernels(), pytest.raises(ValueError, match=r"block_table\[1\] holds block 999"):
        attend(bad)
    with jaxpage.debug_checks():
        assert np.isfinite(interpreted("on_wait", attend, table)).all()
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"block_table\[1\] holds block 999"):
            interpreted("on_wait", attend, bad)
