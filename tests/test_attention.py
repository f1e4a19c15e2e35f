"""One suite for every attention implementation: against the float64 oracle, with poison in every slot that holds no token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Problem, build
from flax import nnx
from helpers_gpu import interpreted
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from oracle import paged_attention as oracle

import jaxpage
from models import Decoder, ModelConfig
from pallas_kernels import layout, validate

TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 3e-3}
INTERPRETED = ("tpu", "gpu")
IMPLEMENTATIONS = ("reference", "xla", *(pytest.param(name, marks=pytest.mark.slow) for name in INTERPRETED))
BACKEND = {"reference": "xla", "xla": "xla", "tpu": "tpu", "gpu": "gpu"}

CASES = {
    "one token": Case((1,)),
    "block filled exactly": Case((16, 32), block_size=16),
    "one past a block": Case((17, 33), block_size=16),
    "mixed lengths": Case((1, 16, 17, 4095), block_size=16),
    "tail of a full row": Case((4090,), block_size=16),
    "rows of length zero": Case((0, 5, 0, 40, 0)),
    "only rows of length zero": Case((0, 0)),
    "block size 1": Case((1, 7, 150), block_size=1),
    "block size 8": Case((1, 8, 150), block_size=8),
    "block size 32": Case((31, 32, 150), block_size=32),
    "block size 64": Case((63, 64, 300), block_size=64),
    "block size 128": Case((127, 128, 300), block_size=128),
    "block larger than a chunk": Case((1, 300, 700), block_size=384),
    "block size not a power of two": Case((1, 11, 300), block_size=11),
    "head_dim 64": Case((33, 5), head_dim=64),
    "head_dim 80": Case((33, 5), head_dim=80),
    "head_dim 96": Case((33, 5), head_dim=96),
    "head_dim 128": Case((33, 5), head_dim=128),
    "head_dim 256": Case((33, 5), head_dim=256),
    "one kv head, one query head": Case((33, 5), kv_heads=1, group=1),
    "3 kv heads, groups of 3": Case((33, 5), kv_heads=3, group=3),
    "5 kv heads, groups of 7": Case((33, 5), kv_heads=5, group=7),
    "8 kv heads, groups of 8": Case((33, 5), kv_heads=8, group=8),
    "table width 1": Case((16, 3), width=1),
    "table width 3": Case((16, 3), width=3),
    "table width 7": Case((100, 3), width=7),
    "table width 257": Case((100, 3), width=257),
    "more sequences than a group": Case(tuple(range(0, 600, 2)), block_size=8, kv_heads=2, group=2, head_dim=16),
    "window smaller than a block": Case((5, 40, 300), window=5),
    "window of a block": Case((5, 40, 300), window=16),
    "window not a multiple of a block": Case((5, 40, 300), window=37),
    "window of one token": Case((5, 40), window=1),
    "window longer than the context": Case((5, 40), window=1000),
    "soft cap": Case((5, 40), soft_cap=3.0),
    "sinks": Case((0, 5, 40, 300), sinks=True),
    "all at once": Case((5, 300), window=50, soft_cap=5.0, sinks=True, kv_heads=3, group=3),
    "prefill": Case((40, 7, 16), new=(40, 7, 16)),
    "prefill with padding rows": Case((40, 7), new=(40, 7), padding=17),
    "prefill longer than a tile": Case((200, 65), new=(200, 65)),
    "chunk after a context": Case((200, 65, 20), new=(100, 1, 20)),
    "chunk of many sequences": Case((200, 0, 65, 20, 9), new=(3, 0, 1, 20, 0), padding=5),
    "chunk with block size 1": Case((50, 21), new=(9, 21), block_size=1),
    "chunk with large blocks": Case((500, 21), new=(90, 21), block_size=384),
    "chunk with a window": Case((200, 65), new=(100, 65), window=37),
    "chunk with sinks and soft cap": Case((200, 65), new=(100, 65), sinks=True, soft_cap=2.0),
    "drafts of 8 tokens": Case((100, 30, 9), new=(8, 8, 8), block_size=2),
    "bfloat16": Case((1, 17, 300), dtype="bfloat16", head_dim=64),
    "bfloat16 chunk": Case((200, 65), new=(100, 65), dtype="bfloat16", head_dim=64),
    "float16": Case((1, 17, 300), dtype="float16", head_dim=64),
}


def no_tpu_kernel(case: Case) -> str:
    if len(case.lengths) > 100:
        return "takes minutes in the interpreter"
    if case.dtype == "float16":
        return "the TPU layout has no float16"
    return f"no TPU kernel for block size {case.block_size}" if case.block_size in (11, 384) else ""


def no_gpu_kernel(case: Case) -> str:
    if len(case.lengths) > 100 or max(case.lengths) > 1000:
        return "takes minutes in the interpreter"
    return f"no GPU kernel for block size {case.block_size}" if case.block_size in (11, 384) else ""


NO_KERNEL = {"tpu": no_tpu_kernel, "gpu": no_gpu_kernel}


def case_for(implementation: str, case: Case) -> Case:
    """The GPU layout holds no float32."""
    return dataclasses.replace(case, dtype="bfloat16") if implementation == "gpu" and case.dtype == "float32" else case


def problem_for(implementation: str, case: Case, seed: int = 0) -> Problem:
    return build(case_for(implementation, case), seed, BACKEND[implementation])


def attend(implementation: str, *arguments, **options):
    """A compiled call of one implementation; a kernel runs in its interpreter, which must find no race."""

    def paged_attention(*arguments):
        return jaxpage.paged_attention(*arguments, **options, implementation=implementation)

    if implementation == "gpu":
        return interpreted(paged_attention, *arguments)
    call = jax.jit(paged_attention)
    if implementation != "tpu":
        return call(*arguments)
    with jaxpage.interpret_kernels(pltpu.InterpretParams(detect_races=True)):
        result = jax.block_until_ready(call(*arguments))
    assert not interpret_pallas_call.races.races_found
    return result


def run(problem: Problem, implementation: str):
    return attend(implementation, *problem.arguments, **problem.options)


def expected(problem: Problem):
    q, _, _, _, table, lengths, starts = problem.arguments
    return oracle(q, problem.keys, problem.values, table, lengths, starts, **problem.options)


def assert_close(out, target, dtype: str):
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    scale = max(np.abs(target).max(), 1e-30)
    assert np.abs(out - target).max() / scale <= TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name, implementation):
    case = case_for(implementation, CASES[name])
    if implementation in NO_KERNEL and (reason := NO_KERNEL[implementation](case)):
        pytest.skip(reason)
    problem = build(case, seed=sum(map(ord, name)), backend=BACKEND[implementation])
    out, storage = run(problem, implementation)
    assert_close(out, expected(problem), case.dtype)
    # The write put the new tokens in their slots and touched no other but those of the null block.
    for after, logical in zip(layout.unpack(storage), (problem.keys, problem.values), strict=True):
        np.testing.assert_array_equal(np.asarray(after, np.float32)[1:], logical[1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_no_sequence_are_zero(implementation):
    decode = run(problem_for(implementation, Case((0, 5, 0))), implementation)[0]
    assert not np.any(np.asarray(decode)[[0, 2]])
    ragged = run(problem_for(implementation, Case((5, 9), new=(5, 2), padding=9)), implementation)[0]
    assert not np.any(np.asarray(ragged)[7:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_batched_equals_alone(implementation):
    lengths = (1, 16, 17, 150 if implementation == "gpu" else 4095)  # its interpreter takes minutes for longer ones
    problem = problem_for(implementation, Case(lengths))
    together = np.asarray(run(problem, implementation)[0])
    q, k, v, storage, table, _, _ = problem.arguments
    for seq, length in enumerate(lengths):
        part = slice(seq, seq + 1)
        alone, _ = attend(implementation, q[part], k[part], v[part], storage, table[part], jnp.asarray([length]), **problem.options)
        np.testing.assert_allclose(together[part], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [-1, 0, 1000, 2**31 - 1])
def test_a_block_outside_the_pool_is_neither_read_nor_written(implementation, bad):
    """A clipped id would read or overwrite somebody else's block."""
    problem = problem_for(implementation, Case((20, 40), block_size=16))
    q, k, v, storage, table, lengths, _ = problem.arguments
    stored = layout.unpack(storage)[0]
    dtype = stored.dtype.name
    table = table.at[0, 1].set(bad)  # holds tokens 16 to 19 of sequence 0, its newest token among them
    out, after = run(Problem((q, k, v, storage, table, lengths, None), problem.options, problem.keys, problem.values), implementation)
    # Sequence 0 sees its first block only; sequence 1 is as before.
    first = oracle(q[:1], problem.keys, problem.values, table[:1], np.asarray([16]), None, **problem.options)
    assert_close(out[:1], first, dtype)
    assert_close(out[1:], expected(problem)[1:], dtype)
    changed = np.asarray(layout.unpack(after)[0])[1:] != np.asarray(stored)[1:]
    changed &= ~(np.isnan(np.asarray(layout.unpack(after)[0])[1:]) & np.isnan(np.asarray(stored)[1:]))
    assert set(np.flatnonzero(changed.any((1, 2, 3))) + 1) == {int(table[1, 39 // 16])}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_that_sees_no_token_gives_zeros(implementation):
    """Its own block is outside the pool, and the window hides all others."""
    problem = problem_for(implementation, Case((20, 40), window=1))
    q, k, v, storage, table, lengths, _ = problem.arguments
    broken = Problem((q, k, v, storage, table.at[0, 1].set(-1), lengths, None), problem.options, problem.keys, problem.values)
    out, _ = run(broken, implementation)
    assert not np.any(np.asarray(out)[0])
    assert_close(out[1:], expected(problem)[1:], q.dtype.name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_position_beyond_the_table_is_dropped(implementation):
    problem = problem_for(implementation, Case((32, 16), block_size=16, width=2))
    q, k, v, storage, table, lengths, _ = problem.arguments
    storage = jax.tree.map(jnp.nan_to_num, storage)  # the slot of token 31, which stays unwritten here, is in sight
    grown = lengths.at[0].set(33)
    out, after = run(Problem((q, k, v, storage, table, grown, None), problem.options, problem.keys, problem.values), implementation)
    assert np.isfinite(np.asarray(out)).all()
    before, now = (np.asarray(layout.unpack(each)[0])[1:] for each in (storage, after))
    changed = (before != now) & ~(np.isnan(before) & np.isnan(now))
    assert set(np.flatnonzero(changed.any((1, 2, 3))) + 1) == {int(table[1, 0])}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_window_that_begins_beyond_the_table_sees_nothing(implementation):
    problem = problem_for(implementation, Case((32, 90), block_size=16, width=7, window=20))
    q, k, v, storage, table, lengths, _ = problem.arguments
    storage = jax.tree.map(jnp.nan_to_num, storage)  # the slot of token 31, which stays unwritten here
    out, _ = attend(implementation, q, k, v, storage, table, lengths.at[0].set(5000), **problem.options)
    assert not np.any(np.asarray(out)[0])
    assert_close(out[1:], expected(problem)[1:], q.dtype.name)


def test_work_does_not_follow_the_table_width():
    """The program for a wide table holds no array as large as the whole context."""
    problem = build(Case((100, 3), width=4096, block_size=16, head_dim=64))
    compiled = jax.jit(lambda *arguments: jaxpage.paged_attention(*arguments, **problem.options, implementation="xla"), donate_argnums=3)
    memory = compiled.lower(*problem.arguments).compile().memory_analysis()
    context = 2 * 4096 * 16 * 2 * 64 * 4  # bytes of the keys of two whole rows
    assert memory.temp_size_in_bytes < context / 4


def test_contiguous_reservation_agrees_with_the_oracle():
    rng = np.random.default_rng(5)
    config = jaxpage.CacheConfig.contiguous(num_layers=1, num_kv_heads=2, head_dim=16, max_seqs=4, max_length=40)
    cache = jaxpage.init_cache(config)
    lengths = jnp.asarray([7, 0, 40, 1])
    cache, ok = jaxpage.reserve(cache, lengths)
    assert ok.all()

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    storage = layout.pack(draw(5, 40, 2, 16), draw(5, 40, 2, 16))
    q, k, v = draw(4, 6, 16), draw(4, 2, 16), draw(4, 2, 16)
    for window in (None, 9):
        options = {"scale": 0.25, "window": window, "soft_cap": 4.0, "sinks": draw(6)}
        out, after = jaxpage.paged_attention(q, k, v, storage, cache.table.blocks, lengths, **options, implementation="contiguous")
        target = oracle(q, *layout.unpack(after), cache.table.blocks, lengths, None, **options)
        assert_close(out, target, "float32")


def test_the_best_implementation_is_chosen_and_a_named_one_is_never_replaced():
    problem = build(Case((20, 40)))
    storage = problem.arguments[3]
    with pytest.raises(NotImplementedError, match="needs one block a sequence"):
        run(problem, "contiguous")
    with pytest.raises(NotImplementedError, match="there are: tpu, gpu, xla, contiguous, reference"):
        run(problem, "cuda")
    assert jaxpage.supports("xla", storage, num_heads=4, num_seqs=2, table_width=3, decode=True) == (True, "")
    able, reason = jaxpage.supports("contiguous", storage, num_heads=4, num_seqs=2, table_width=1, decode=True)
    assert not able and "a block reserved for each of the 2 sequences" in reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: jnp.zeros((2, 4))}, r"q must have shape \[T, H, D\]"),
        ({0: jnp.zeros((2, 4, 16))}, "q has head_dim 16, the cache holds 32"),
        ({0: jnp.zeros((2, 5, 32))}, "multiple of the cache's 2 kv heads"),
        ({0: jnp.zeros((2, 4, 32), jnp.int32)}, "q must be one of float32, bfloat16, float16, got int32"),
        ({1: jnp.zeros((3, 2, 32))}, "k must have shape"),
        ({2: jnp.zeros((2, 2, 31))}, "v must have shape"),
        ({4: jnp.zeros((2,), jnp.int32)}, "block_table must have shape"),
        ({4: jnp.zeros((2, 3))}, "block_table must hold int32"),
        ({5: jnp.zeros((3,), jnp.int32)}, "lengths must have shape"),
        ({4: jnp.zeros((3, 3), jnp.int32), 5: jnp.zeros((3,), jnp.int32)}, "takes one query a sequence"),
        ({6: jnp.zeros((2,), jnp.int32)}, "query_starts must have shape"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    arguments = list(build(Case((20, 40))).arguments)
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(ValueError, match=message):
        jaxpage.paged_attention(*arguments, scale=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window"),
        ({"soft_cap": 0.0}, "soft_cap"),
        ({"sinks": jnp.zeros(3)}, "sinks"),
        ({"kv_scales": jnp.ones(3)}, "kv_scales"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        jaxpage.paged_attention(*build(Case((20, 40))).arguments, scale=1.0, **options)


def test_debug_checks_name_what_is_wrong():
    q, k, v, storage, table, lengths, _ = build(Case((20, 40))).arguments
    bad_block = table.at[1, 0].set(999)
    with jaxpage.debug_checks():
        jaxpage.paged_attention(q, k, v, storage, table, lengths, scale=1.0)
        with pytest.raises(ValueError, match=r"block_table\[1\] holds block 999"):
            jaxpage.paged_attention(q, k, v, storage, bad_block, lengths, scale=1.0)
        with pytest.raises(ValueError, match=r"lengths\[0\] is 999"):
            jaxpage.paged_attention(q, k, v, storage, table, lengths.at[0].set(999), scale=1.0)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"block_table\[1\] holds block 999"):
            jax.block_until_ready(jax.jit(lambda table: jaxpage.paged_attention(q, k, v, storage, table, lengths, scale=1.0))(bad_block))
    with pytest.raises(ValueError, match="query_starts must rise"):
        validate.dynamic(table, lengths, np.asarray([0, 5, 3]), num_blocks=9, block_size=16, num_queries=9)
    with pytest.raises(ValueError, match="sequence 0 has 21 queries but only 20 tokens"):
        validate.dynamic(table, lengths, np.asarray([0, 21, 22]), num_blocks=9, block_size=16, num_queries=22)


def test_reference_is_differentiable():
    problem = build(Case((9, 20), new=(9, 3)))
    q, k, v, storage, table, lengths, starts = problem.arguments
    storage = jax.tree.map(jnp.nan_to_num, storage)

    def loss(q, k, v):
        return jaxpage.paged_attention(q, k, v, storage, table, lengths, starts, **problem.options, implementation="reference")[0].sum()

    for gradient in jax.grad(loss, argnums=(0, 1, 2))(q, k, v):
        assert np.isfinite(np.asarray(gradient)).all() and np.any(np.asarray(gradient))


def test_every_head_shape_runs_through_a_decoder():
    """An uncached pass and a paged one agree for odd head counts too."""
    config = ModelConfig(
        vocab_size=31, hidden_size=24, intermediate_size=16, num_layers=1, num_heads=15, num_kv_heads=5, head_dim=6, max_length=64
    )
    decoder = Decoder(config, rngs=nnx.Rngs(1))
    tokens = jnp.asarray([3, 1, 4, 1, 5, 9, 2])
    cache = jaxpage.init_cache(jaxpage.CacheConfig(1, 5, 6, num_blocks=9, block_size=4, max_seqs=1, max_blocks_per_seq=2))
    cache, _ = jaxpage.reserve(cache, jnp.asarray([7]))
    hidden, _ = decoder.step(tokens, cache, jnp.asarray([7]), jnp.asarray([0, 7]))
    np.testing.assert_allclose(decoder.logits(hidden), decoder(tokens[None])[0], rtol=1e-4, atol=1e-5)
