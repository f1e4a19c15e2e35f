"""The tiles of real devices, which the other tests of the kernels are too small for: chunks of several parts, tiles of 128 queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, build
from oracle import paged_attention as oracle

import jaxpage
from pallas_kernels import layout
from pallas_kernels.tiles import TpuLimits, tpu_limits
from pallas_kernels.tpu import implementation

CASES = {
    "mixed": (Case((1300, 700, 1, 90), new=(200, 5, 1, 90), head_dim=64, kv_heads=2, dtype="bfloat16"), 1.5e-2),
    "window and sinks": (Case((1500, 1100), new=(130, 1), head_dim=64, kv_heads=3, window=300, sinks=True), 1e-5),
    "words": (Case((700, 1030), new=(20, 1), block_size=2, head_dim=128, kv_heads=8, group=1, window=130, dtype="bfloat16"), 1.5e-2),
    "large blocks": (Case((1025, 600), new=(140, 600), block_size=256, head_dim=96, kv_heads=1, group=12), 1e-5),
}


@pytest.fixture(autouse=True)
def real_limits(monkeypatch):
    monkeypatch.setattr(implementation, "tpu_limits", lambda kind: TpuLimits(64 * 2**20, 1024, 128))


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name):
    case, tolerance = CASES[name]
    problem = build(case, backend="tpu")
    with jaxpage.interpret_kernels():
        out, _ = jax.jit(lambda *arguments: jaxpage.paged_attention(*arguments, **problem.options, implementation="tpu"))(
            *problem.arguments
        )
    q, _, _, _, table, lengths, starts = problem.arguments
    target = oracle(q, problem.keys, problem.values, table, lengths, starts, **problem.options)
    assert np.abs(np.asarray(out, np.float64) - target).max() <= tolerance * np.abs(target).max()


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7", "TPU7x"])
def test_every_name_of_a_generation_has_its_limits(kind):
    assert tpu_limits(kind).vmem_limit_bytes >= (15 if kind == "TPU v4" else 48) * 2**20
    assert tpu_limits("TPU from tomorrow") == tpu_limits("TPU v4")


def test_8_bit_storage_says_which_scales_it_needs():
    q, k = jnp.ones((1, 2, 64)), jnp.ones((1, 2, 64))
    table, lengths = jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    for scaled, scales, message in ((False, None, "needs kv_scales"), (True, jnp.ones(2), "has one for each token and head")):
        storage = layout.init_storage("tpu", 2, 16, 2, 64, "int8", scaled)
        with pytest.raises(ValueError, match=message):
            jaxpage.paged_attention(q, k, k, storage, table, lengths, scale=1.0, kv_scales=scales)
    with pytest.raises(ValueError, match="only 8-bit dtypes have scales, not bfloat16"):
        layout.init_storage("tpu", 2, 16, 2, 64, "bfloat16", scaled=True)
    with pytest.raises(ValueError, match="scale must be a number"):
        jax.jit(lambda scale: jaxpage.paged_attention(q, k, k, layout.pack(k[None], k[None]), table, lengths, scale=scale))(1.0)
