"""The GPU decode kernel in its interpreter, over all that a call can vary: sizes, head counts, dtypes, lengths, options.

Every case runs with race detection, NaN in every slot that holds no token, and shuffled blocks.
"""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Problem, build, pairwise
from helpers_gpu import TOLERANCE, assert_close, attend, expected, interpreted
from oracle import paged_attention as oracle

import jaxpage
from pallas_kernels import layout
from pallas_kernels.gpu.decode import split_decode
from pallas_kernels.gpu.device import Gpu, find_gpu
from pallas_kernels.gpu.spec import Spec, choose_decode, choose_prefill
from pallas_kernels.gpu.splits import num_splits

LENGTHS = {  # tiles are 64 tokens
    "around blocks": (1, 0, 8, 9),
    "around tiles": (63, 64, 129),
    "several tiles": (300, 65),
}

LEVELS = {
    "block_size": (8, 16, 32, 64, 128),
    "dtype": tuple(TOLERANCE),
    "head_dim": (64, 80, 96, 128, 256),
    "group": (1, 3, 4, 8, 11),
    "kv_heads": (1, 3, 8),
    "lengths": tuple(LENGTHS),
    "window": (None, 1, 37, "block", 100),
    "soft_cap": (None, 3.0),
    "sinks": (False, True),
    "width": (None, 41),
}


def case_of(row: dict) -> Case:
    window = row["block_size"] if row["window"] == "block" else row["window"]
    return Case(**{**row, "lengths": LENGTHS[row["lengths"]], "window": window})


ROWS = pairwise(LEVELS)
CASES = {
    "{dtype}, {lengths}, block {block_size}, head_dim {head_dim}, {kv_heads}x{group} heads, window {window}".format(**row): case_of(row)
    for row in ROWS
} | {
    "block larger than two tiles": Case((1, 256, 700), block_size=256, dtype="bfloat16", kv_heads=1, head_dim=64),
    "head_dim of a padded head": Case((5, 70), dtype="bfloat16", head_dim=8),
    "only rows of length zero": Case((0, 0), dtype="bfloat16", head_dim=64),
    "a window far behind": Case((1000, 900), window=70, dtype="bfloat16", kv_heads=1, head_dim=64),
    "a wide table, so several splits": Case((1000, 3, 0), dtype="bfloat16", kv_heads=1, head_dim=64, width=300, sinks=True),
}


def test_every_two_levels_meet():
    for (a, levels_of_a), (b, levels_of_b) in itertools.combinations(LEVELS.items(), 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(levels_of_a, levels_of_b))


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name):
    case = CASES[name]
    problem = build(case, seed=len(name), backend="gpu")
    out, storage = attend(problem)
    assert_close(out, expected(problem), TOLERANCE[case.dtype])
    for after, logical in zip(layout.unpack(storage), (problem.keys, problem.values), strict=True):
        np.testing.assert_array_equal(np.asarray(after, np.float32)[1:], logical[1:])


@pytest.mark.parametrize("bad", [-1, 0, 1000, 2**31 - 1])
def test_a_block_outside_the_pool_is_neither_read_nor_written(bad):
    problem = build(Case((20, 40), dtype="bfloat16", head_dim=64), backend="gpu")
    q, k, v, storage, table, lengths, _ = problem.arguments
    table = table.at[0, 1].set(bad)  # holds tokens 16 to 19 of sequence 0, its newest token among them
    out, after = attend(Problem((q, k, v, storage, table, lengths, None), problem.options, problem.keys, problem.values))
    # Sequence 0 sees its first block only; sequence 1 is as before.
    first = oracle(q[:1], problem.keys, problem.values, table[:1], np.asarray([16]), None, **problem.options)
    assert_close(out[:1], first, TOLERANCE["bfloat16"])
    assert_close(out[1:], expected(problem)[1:], TOLERANCE["bfloat16"])
    before, now = (np.nan_to_num(np.asarray(each.blocks, np.float32), nan=1e9)[1:] for each in (storage, after))
    assert set(np.flatnonzero((before != now).any((1, 2, 3))) + 1) == {int(table[1, 39 // 16])}


def test_a_query_that_sees_no_token_gives_zeros():
    """Its own block is outside the pool, and the window hides all others."""
    problem = build(Case((20, 40), window=1, dtype="bfloat16", head_dim=64), backend="gpu")
    q, k, v, storage, table, lengths, _ = problem.arguments
    out, _ = attend(Problem((q, k, v, storage, table.at[0, 1].set(-1), lengths, None), problem.options, problem.keys, problem.values))
    assert not np.any(np.asarray(out)[0])
    assert_close(out[1:], expected(problem)[1:], TOLERANCE["bfloat16"])


def test_a_position_beyond_the_table_is_dropped():
    problem = build(Case((32, 16), width=2, dtype="bfloat16", head_dim=64), backend="gpu")
    q, k, v, storage, table, lengths, _ = problem.arguments
    storage = jax.tree.map(jnp.nan_to_num, storage)  # the slot of token 31, which stays unwritten here, is in sight
    out, _ = attend(Problem((q, k, v, storage, table, lengths.at[0].set(33), None), problem.options, problem.keys, problem.values))
    assert np.isfinite(np.asarray(out, np.float32)).all()


def test_blocks_outside_the_window_are_not_read():
    problem = build(Case((300,), block_size=8, window=170, dtype="bfloat16", head_dim=64), backend="gpu")
    q, k, v, storage, table, lengths, _ = problem.arguments
    hidden = table[0, : (300 - 170) // 8]
    storage = layout.GpuStorage(storage.blocks.at[hidden].set(jnp.nan), storage.head_dim)
    out, _ = attend(Problem((q, k, v, storage, table, lengths, None), problem.options, problem.keys, problem.values))
    assert_close(out, expected(problem), TOLERANCE["bfloat16"])


def test_batched_equals_alone():
    problem = build(Case((1, 0, 150), dtype="bfloat16", kv_heads=1, head_dim=64), backend="gpu")
    together = np.asarray(attend(problem)[0])
    q, k, v, storage, table, lengths, _ = problem.arguments
    for seq in range(3):
        part = slice(seq, seq + 1)
        alone = attend(Problem((q[part], k[part], v[part], storage, table[part], lengths[part], None), problem.options, None, None))[0]
        np.testing.assert_array_equal(together[part], alone)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_any_number_of_splits_gives_the_same(dtype):
    """But for the rounding of the weights, which are relative to the highest score of a split. Splits without a tile take no part."""
    problem = build(Case((1, 0, 65, 330), dtype=dtype, kv_heads=1, group=3, head_dim=64), backend="gpu")
    q, _, _, _, table, lengths, _ = problem.arguments
    first = jnp.maximum(lengths - 300, 0)
    target = expected(Problem(problem.arguments, problem.options | {"window": 300}, problem.keys, problem.values))
    target_lse = np.stack([log_sum_exp(problem, seq, int(first[seq])) for seq in range(4)])
    for splits in (1, 2, 5):
        spec = Spec(16, 64, dtype, 64, 2, 0.125, None, 300, True)
        out, lse = interpreted(
            lambda *a, spec=spec, splits=splits: split_decode(*a, spec, splits), q, problem.after.blocks, table, first, lengths
        )
        assert_close(out, target, TOLERANCE[dtype])
        np.testing.assert_allclose(lse, target_lse, atol=1e-5)


def log_sum_exp(problem: Problem, seq: int, first: int) -> np.ndarray:
    """Of the scores of each head of a sequence, from a token on, for one kv head."""
    q, _, _, _, table, lengths, _ = problem.arguments
    token = np.arange(first, lengths[seq])
    keys = np.asarray(problem.keys[np.asarray(table)[seq, token // 16], token % 16, 0], np.float64)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(np.asarray(q[seq], np.float64) @ keys.T * problem.options["scale"]).sum(axis=-1))


def test_the_number_of_splits_follows_from_the_sizes():
    assert num_splits(programs=8, tiles=1000, num_sms=132) == 33  # one sequence of 8 kv heads fills an H100 twice
    assert num_splits(programs=1000, tiles=1000, num_sms=132) == 1  # a large batch fills it alone
    assert num_splits(programs=8, tiles=12, num_sms=132) == 3  # short contexts are not cut to pieces
    assert num_splits(programs=1, tiles=1, num_sms=132) == 1


def test_tiles_fit_the_shared_memory():
    assert choose_decode(128, 2, 232448) == (64, 3)
    assert choose_decode(64, 2, 232448) == (64, 4)
    assert choose_decode(256, 2, 232448) == (64, 2)
    assert choose_decode(256, 2, 101376) == (64, 0)  # so prefill's kernel decodes too
    assert choose_prefill(128, 2, 101376) == (64, 2)
    assert choose_prefill(256, 2, 232448) == (32, 2)
    assert choose_prefill(256, 2, 101376) == (16, 2)


def test_what_is_not_supported_is_refused_with_the_reason():
    def reason(storage: layout.Storage, decode: bool = True) -> str:
        return jaxpage.supports("gpu", storage, num_heads=4, num_seqs=2, table_width=3, decode=decode)[1]

    def storage(block_size: int, head_dim: int) -> layout.Storage:
        return layout.init_storage("gpu", 4, block_size, 2, head_dim, "bfloat16")

    assert "needs an NVIDIA GPU" in reason(storage(16, 64))
    with jaxpage.interpret_kernels():
        assert reason(storage(16, 64)) == ""
        assert "the cache has XlaStorage" in reason(layout.init_storage("xla", 4, 16, 2, 64, "bfloat16"))
        assert reason(storage(16, 64), decode=False) == ""
        assert "block sizes 8, 16" in reason(storage(1, 64))
        assert "head_dim up to 256, not 257" in reason(storage(16, 257))
    with pytest.raises(NotImplementedError, match="the gpu layout does not hold float32; it holds: bfloat16, float16"):
        layout.init_storage("gpu", 4, 16, 2, 64, "float32")


def test_the_device_is_asked_what_it_is(monkeypatch):
    def found(kind: str, capability: str) -> tuple[Gpu | None, str]:
        device = types.SimpleNamespace(device_kind=kind, compute_capability=capability, core_count=100)
        monkeypatch.setattr(jax, "devices", lambda: [device])
        return find_gpu()

    assert found("NVIDIA H200", "9.0") == (Gpu(100, 232448, True), "")
    assert found("NVIDIA RTX PRO 6000", "12.0") == (Gpu(100, 101376, True), "")
    assert found("NVIDIA A100-SXM4-80GB", "8.0") == (Gpu(100, 166912, False), "")
    assert found("Tesla T4", "7.5") == (
        None,
        "needs an NVIDIA GPU, this host has Tesla T4; tests run it within jaxpage.interpret_kernels()",
    )
    assert found("NVIDIA T4", "7.5") == (None, "needs compute capability 8.0 or newer, NVIDIA T4 has 7.5")
    assert "needs an NVIDIA GPU, this host has AMD" in found("AMD MI300X", "gfx942")[1]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [(64, 8, "bfloat16"), (80, 16, "float16"), (96, 64, "bfloat16"), (128, 128, "float16"), (256, 32, "bfloat16")],
)
def test_lowers_for_a_gpu(head_dim, block_size, dtype):
    """Layouts, transfers and shapes of the tensor cores are checked there, and nowhere in the interpreter."""
    spec = Spec(block_size, head_dim, dtype, 64, 2, 0.1, 5.0, None, True)
    shapes = [(2, 12, head_dim), (9, block_size, 6, head_dim), (2, 7), (2,), (2,)]
    arguments = [jax.ShapeDtypeStruct(shape, of) for shape, of in zip(shapes, [dtype, dtype, "int32", "int32", "int32"], strict=True)]
    lowered = jax.jit(lambda *a: split_decode(*a, spec, 3)).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
