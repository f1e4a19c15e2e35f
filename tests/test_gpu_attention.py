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
from helpers_gpu import TOLERANCE, assert_close, attend, case_of, check, expected, interpreted, levels
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

import jaxpage
from pallas_kernels import layout
from pallas_kernels.gpu.decode import split_decode
from pallas_kernels.gpu.device import Gpu, find_gpu
from pallas_kernels.gpu.spec import Spec, choose_decode, choose_prefill
from pallas_kernels.gpu.splits import num_splits

pytestmark = pytest.mark.slow  # minutes in the interpreter

LENGTHS = {  # tiles are 64 tokens
    "around blocks": {"lengths": (1, 0, 8, 9)},
    "around tiles": {"lengths": (63, 64, 129)},
    "several tiles": {"lengths": (200, 65)},
}

LEVELS = levels("lengths", LENGTHS)
ROWS = pairwise(LEVELS)
CASES = {
    "{storage}, {lengths}, block {block_size}, head_dim {head_dim}, {kv_heads}x{group} heads, window {window}".format(**row): case_of(
        row, "lengths", LENGTHS
    )
    for row in ROWS
} | {
    "block size 1": Case((65, 7, 0), block_size=1, dtype="bfloat16", kv_heads=1, head_dim=64),
    "block size 2": Case((3, 70), block_size=2, dtype="int8", scaled=True, kv_heads=1, head_dim=64),
    "block size 4": Case((5, 68), block_size=4, dtype="float16", kv_heads=1, head_dim=80, window=37),
    "block larger than two tiles": Case((1, 256, 400), block_size=256, dtype="bfloat16", kv_heads=1, head_dim=64),
    "a few tiles": Case((330, 0, 70), dtype="bfloat16", head_dim=64, kv_heads=1),
    "first token of a tile just out of the window": Case((301, 130), window=172, dtype="bfloat16", kv_heads=1, head_dim=64),
    "scales of several heads": Case((150, 0, 65), dtype="int8", scaled=True, kv_heads=2, group=3, head_dim=64),
    "head_dim of a padded head": Case((5, 70), dtype="bfloat16", head_dim=8),
    "only rows of length zero": Case((0, 0), dtype="bfloat16", head_dim=64),
    "a window far behind": Case((700, 650), window=70, dtype="bfloat16", kv_heads=1, head_dim=64),
    "a wide table, so several splits": Case((600, 3, 0), dtype="bfloat16", kv_heads=1, head_dim=64, width=300, sinks=True),
}


def test_every_two_levels_meet():
    for (a, levels_of_a), (b, levels_of_b) in itertools.combinations(LEVELS.items(), 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(levels_of_a, levels_of_b))


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name):
    check(CASES[name], seed=len(name))


def test_blocks_outside_the_window_are_not_read():
    problem = build(Case((300,), block_size=8, window=170, dtype="bfloat16", head_dim=64), backend="gpu")
    q, k, v, storage, table, lengths, _ = problem.arguments
    hidden = table[0, : (300 - 170) // 8]
    storage = layout.GpuStorage(storage.blocks.at[hidden].set(jnp.nan), storage.head_dim)
    out, _ = attend(Problem((q, k, v, storage, table, lengths, None), problem.options, problem.keys, problem.values))
    assert_close(out, expected(problem), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_any_number_of_splits_gives_the_same(dtype):
    """But for the rounding of the weights, which are relative to the highest score of a split. Splits without a tile take no part."""
    problem = build(Case((1, 0, 65, 330), dtype=dtype, kv_heads=1, group=3, head_dim=64), backend="gpu")
    q, _, _, _, table, lengths, _ = problem.arguments
    first = jnp.maximum(lengths - 300, 0)
    target = expected(Problem(problem.arguments, problem.options | {"window": 300}, problem.keys, problem.values))
    target_lse = np.stack([log_sum_exp(problem, seq, int(first[seq])) for seq in range(4)])
    for splits in (1, 2, 5):
        spec = Spec(16, 64, dtype, 64, 2, 0.125, None, 300, True)
        out, lse = interpreted(lambda *a, spec=spec, splits=splits: split_decode(*a, spec, splits), q, problem.after, table, first, lengths)
        assert_close(out, target, TOLERANCE[dtype])
        np.testing.assert_allclose(lse, target_lse, atol=1e-5)


def log_sum_exp(problem: Problem, seq: int, first: int) -> np.ndarray:
    """Of the scores of each head of a sequence, from a token on, for one kv head."""
    q, _, _, _, table, lengths, _ = problem.arguments
    token = np.arange(first, lengths[seq])
    keys = np.asarray(problem.keys[np.asarray(table)[seq, token // 16], token % 16, 0], np.float64)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(np.asarray(q[seq], np.float64) @ keys.T * problem.options["scale"]).sum(axis=-1))


@pytest.mark.parametrize("group", [4, 8])
def test_each_byte_of_the_context_is_copied_once(group, monkeypatch):
    """But for the rest of each sequence's last block."""
    copied = []

    class Counted(gpu_callbacks.AsyncCopyGmemToSmemTask):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            copied.append(np.prod(arguments["src_access"].shape))

    monkeypatch.setattr(gpu_callbacks, "AsyncCopyGmemToSmemTask", Counted)
    lengths = (650, 0, 470)
    attend(build(Case(lengths, dtype="bfloat16", kv_heads=1, group=group, head_dim=64), backend="gpu"))
    elements = sum(lengths) * 2 * 64  # keys and values
    assert elements <= sum(copied) <= 1.02 * elements


@pytest.mark.parametrize(("dtype", "error"), [("int8", 1 / 250), ("float8_e4m3fn", 1 / 16)])
def test_a_scale_of_its_own_keeps_each_token_and_head(dtype, error):
    rng = np.random.default_rng(1)
    sizes = np.exp(rng.normal(0, 3, (2, 5, 8, 3, 1)))
    sides = rng.normal(size=(2, 5, 8, 3, 20)) * sizes
    sides[:, 2, 3] = 0
    storage = layout.pack(*jnp.asarray(sides, jnp.float32), "gpu", dtype, scaled=True)
    for after, before in zip(layout.unpack(storage), sides, strict=True):
        assert (np.abs(after - before).max(-1) <= error * np.abs(before).max(-1)).all()


def test_the_number_of_splits_follows_from_the_sizes():
    assert num_splits(programs=8, tiles=1000, num_sms=132) == 33  # one sequence of 8 kv heads fills an H100 twice
    assert num_splits(programs=1000, tiles=1000, num_sms=132) == 1  # a large batch fills it alone
    assert num_splits(programs=8, tiles=12, num_sms=132) == 3  # short contexts are not cut to pieces
    assert num_splits(programs=1, tiles=1, num_sms=132) == 1


def test_tiles_fit_the_shared_memory():
    assert choose_decode(16, 128, "bfloat16", 232448) == (64, 3)
    assert choose_decode(16, 64, "bfloat16", 232448) == (64, 4)
    assert choose_decode(16, 256, "bfloat16", 232448) == (64, 2)
    assert choose_decode(16, 256, "bfloat16", 101376) == (64, 0)  # so prefill's kernel decodes too
    assert choose_decode(16, 256, "int8", 101376) == (64, 0)
    assert choose_prefill(16, 128, "bfloat16", 101376) == (64, 2)
    assert choose_prefill(16, 256, "bfloat16", 232448) == (32, 2)
    assert choose_prefill(16, 256, "bfloat16", 101376) == (16, 2)
    assert choose_prefill(1, 256, "bfloat16", 101376) == (16, 2)


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
        assert "block sizes 1, 2, 4, 8, 16" in reason(storage(12, 64))
        assert reason(storage(1, 80)) == "needs keys and values of a block to fill multiples of 128 bytes a head, not 1 x 320"
        assert "head_dim up to 256, not 257" in reason(storage(16, 257))
    with pytest.raises(NotImplementedError, match="the gpu layout does not hold float32; it holds: bfloat16, float16, int8"):
        layout.init_storage("gpu", 4, 16, 2, 64, "float32")


def test_the_device_is_asked_what_it_is(monkeypatch):
    def found(kind: str, capability: str) -> tuple[Gpu | None, str]:
        device = types.SimpleNamespace(device_kind=kind, compute_capability=capability, core_count=100)
        monkeypatch.setattr(jax, "devices", lambda: [device])
        return find_gpu()

    assert found("NVIDIA H200", "9.0") == (Gpu(100, 232448, True), "")
    assert found("NVIDIA RTX PRO 6000", "12.0") == (Gpu(100, 101376, True), "")
    assert found("NVIDIA A100-SXM4-80GB", "8.0") == (Gpu(100, 166912, False, has_float8=False), "")
    assert found("NVIDIA L4", "8.9") == (Gpu(100, 101376, False), "")
    assert found("Tesla T4", "7.5") == (
        None,
        "needs an NVIDIA GPU, this host has Tesla T4; tests run it within jaxpage.interpret_kernels()",
    )
    assert found("NVIDIA T4", "7.5") == (None, "needs compute capability 8.0 or newer, NVIDIA T4 has 7.5")
    assert "needs an NVIDIA GPU, this host has AMD" in found("AMD MI300X", "gfx942")[1]


def test_a_cache_gets_this_layout_where_its_kernels_run(monkeypatch):
    def chosen(dtype: str, block_size: int = 16, kind: str = "NVIDIA H200") -> type:
        device = types.SimpleNamespace(device_kind=kind, compute_capability="9.0", core_count=132)
        config = jaxpage.CacheConfig(1, 2, 64, num_blocks=3, block_size=block_size, max_seqs=1, max_blocks_per_seq=2, dtype=dtype)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "gpu")
            patch.setattr(jax, "devices", lambda: [device])
            return type(jaxpage.init_cache(config).storage[0])

    assert chosen("bfloat16") is layout.GpuStorage
    assert chosen("int8") is layout.GpuStorage
    assert chosen("float32") is layout.XlaStorage
    assert chosen("bfloat16", block_size=12) is layout.XlaStorage
    assert chosen("bfloat16", kind="AMD MI300X") is layout.XlaStorage


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [(64, 8, "bfloat16"), (80, 16, "float16"), (96, 64, "float8_e4m3fn"), (128, 1, "int8"), (256, 32, "bfloat16")],
)
def test_lowers_for_a_gpu(head_dim, block_size, dtype):
    """Layouts, transfers and shapes of the tensor cores are checked there, and nowhere in the interpreter."""
    spec = Spec(block_size, head_dim, dtype, 64, 2, 0.1, 5.0, None, True)
    storage = jax.eval_shape(lambda: layout.init_storage("gpu", 9, block_size, 3, head_dim, dtype, dtype == "int8"))
    integers = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((2, 7), (2,), (2,))]
    arguments = [jax.ShapeDtypeStruct((2, 12, head_dim), "bfloat16"), storage, *integers]
    lowered = jax.jit(lambda *a: split_decode(*a, spec, 3)).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
