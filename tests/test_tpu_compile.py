"""The real TPU compiler, without a TPU: the kernels compile for every generation, leave the pool where it is, and cost what they should.

`make kernels` compiles every shape; this is a slice of it.
"""

import json
import subprocess
import sys

import pytest

from pallas_kernels.report import Case, run_cases
from pallas_kernels.targets import TARGETS, compile_environment

pytestmark = pytest.mark.slow

COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from pallas_kernels import layout, tpu
from pallas_kernels.targets import compile_for, target_named

def struct(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)

def compile_case(target, blocks, block_size, kv_heads, group, head_dim, dtype, seqs, width, tokens, window):
    scaled = jnp.dtype(dtype).itemsize == 1
    storage = jax.eval_shape(lambda: layout.init_storage("tpu", blocks, block_size, kv_heads, head_dim, dtype, scaled))
    operand = jnp.float32 if dtype == "float32" else jnp.bfloat16
    starts = () if tokens is None else (struct(jnp.int32, seqs + 1),)
    rows = tokens or seqs

    def steps(storage, q, k, v, table, lengths, *starts):
        def step(_, carry):
            storage, q = carry
            storage = tpu.write(storage, k, v, table, lengths, *(starts or (None,)))
            options = dict(scale=1.0, window=window, soft_cap=None, sinks=None)
            return storage, tpu.attend(q, storage, table, lengths, *(starts or (None,)), **options)

        return jax.lax.fori_loop(0, 3, step, (storage, q))

    q, kv = struct(operand, rows, kv_heads * group, head_dim), struct(operand, rows, kv_heads, head_dim)
    arguments = (storage, q, kv, kv, struct(jnp.int32, seqs, width), struct(jnp.int32, seqs), *starts)
    compiled = compile_for(target, steps, *arguments, donate_argnums=(0,))
    pool = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(storage))
    return compiled.memory_analysis().temp_size_in_bytes, pool

target = target_named(sys.argv[1])
print(json.dumps([compile_case(target, *case) for case in json.loads(sys.argv[2])]))
"""

# Blocks, block size, kv heads, group, head_dim, dtype, sequences, table width, tokens (None: decode), window. Every case is a loop that
# writes and attends three times, as a decode loop does: a kernel or a layout that XLA cannot update in place needs a second pool.
DECODE = [
    (16384, 16, 8, 4, 128, "bfloat16", 64, 256, None, None),
    (65536, 16, 3, 3, 64, "bfloat16", 8, 512, None, None),
    (16384, 16, 1, 8, 128, "int8", 8, 512, None, None),
    (131072, 1, 8, 4, 128, "bfloat16", 8, 4096, None, None),
    (131072, 1, 1, 8, 128, "bfloat16", 8, 256, None, None),
    (131072, 2, 3, 3, 64, "int8", 8, 128, None, None),
]
LONG = (65536, 16, 8, 4, 128, "bfloat16", 256, 8192, None, None)  # 256 sequences of up to 131072 tokens, which share blocks
MIXED = [(8192, 128, 16, 2, 128, "bfloat16", 8, 64, 256, 1024), (65536, 32, 2, 1, 80, "float8_e4m3fn", 8, 128, 96, None)]


@pytest.fixture(autouse=True)
def compiler():
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu")


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.platform == "tpu"])
def test_kernels_compile_and_the_pool_is_never_copied(tmp_path, name):
    cases = DECODE + MIXED + ([LONG] if name in ("v5e", "v6e") else [])
    command = [sys.executable, "-c", COMPILE, name, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=compile_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    for case, (temporary, pool) in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert temporary < 0.01 * pool, (case, temporary, pool)


def cycles(*names):
    """Cycles a token of kernels by (kernel, target, shape, block size)."""
    rows = list(run_cases(Case(*name, "bfloat16") for name in names))
    for row in rows:
        assert row.compiled and row.cycles_per_token is not None, row
    return rows


@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
def test_static_cost_of_decode(target):
    limits = {("llama-3-8b", 16): 1.6, ("llama-3-8b", 128): 1.4, ("llama-3-8b", 1): 7.0, ("llama-3.2-1b", 16): 1.1}
    for row, limit in zip(cycles(*(("ragged_attention decode", target, *key) for key in limits)), limits.values(), strict=True):
        assert row.cycles_per_token <= limit, row


@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
def test_static_cost_beside_the_ragged_kernel_of_jax(target):
    ours, peer = cycles(*((kernel, target, "llama-3-8b", 16) for kernel in ("ragged_attention decode", "jax ragged_paged_attention")))
    assert ours.cycles_per_token <= 0.8 * peer.cycles_per_token


@pytest.mark.parametrize("target", ["v5e", "v6e", "tpu7x"])
def test_prefill_keeps_the_mxus_busy(target):
    (row,) = cycles(("ragged_attention prefill", target, "llama-3-8b", 16))
    assert row.mxu_busy >= 0.5, row
