"""The real GPU compiler, without a GPU: the kernels compile without spills and within each target's shared memory.

`make kernels` compiles every shape; this is a slice of it.
"""

import pytest

from pallas_kernels.report import SHAPES, Case, run_cases
from pallas_kernels.targets import TARGETS, require_compiler

pytestmark = pytest.mark.slow

DECODE = {
    "h100": ("smollm2-135m", "llama-3-8b", "llama-3-70b/8"),
    "b200": ("smollm2-135m", "llama-3-8b", "llama-3-70b/8"),
    "rtx-pro-6000": ("smollm2-135m",),
}


@pytest.fixture(autouse=True, scope="module")
def compiler():
    try:
        require_compiler(TARGETS["h100"])
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("target", DECODE)
def test_decode_compiles_without_spills(target):
    cases = [Case("ragged_attention decode", target, shape, 16, "bfloat16") for shape in DECODE[target]]
    for case, row in zip(cases, run_cases(cases), strict=True):
        assert row.compiled and row.reason is None, row
        assert row.spill_bytes == 0 and 0 < row.registers < 256, row
        assert 0 < row.shared_bytes <= TARGETS[target].architecture.shared_memory
        assert 0 < row.occupancy <= 1
        shape = SHAPES[case.shape]
        assert row.bytes_per_token == 2 * shape.num_kv_heads * shape.head_dim * 2  # each once
        assert row.bound == "hbm"


def test_the_write_leaves_the_pool_where_it_is():
    (row,) = run_cases([Case("kv_write", "h100", "llama-3-8b", 16, "bfloat16")])
    assert row.compiled and row.temp_bytes < 2**20, row  # the pool has 1 GiB


def test_what_is_refused_says_why():
    (row,) = run_cases([Case("ragged_attention decode", "h100", "llama-3-8b", 16, "float32")])
    assert not row.compiled and "the gpu layout does not hold float32" in row.reason
