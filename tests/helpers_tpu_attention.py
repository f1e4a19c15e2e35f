"""Cases for the TPU kernels over all that a call can vary: sizes, head counts, dtypes, kinds of batches, options."""

import functools

import numpy as np
from attention_cases import Case, Problem, build, pairwise
from helpers_tpu import TOLERANCE, assert_same_bits, attend, expected, relative_error, stored

STORAGE = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "int8"},
    "float8": {"dtype": "float8_e4m3fn"},
    "int8 scaled": {"dtype": "int8", "scaled": True},
    "float8 scaled": {"dtype": "float8_e4m3fn", "scaled": True},
}

# Chunks are 128 tokens in the interpreter and tiles 16 or 32 queries, three of them on the chip.
BATCHES = {
    "decode": {"lengths": (1, 0, 128, 129, 290)},
    "mixed": {"lengths": (1, 0, 150, 60, 140, 5), "new": (1, 0, 1, 9, 40, 0), "padding": 3},
    "chunks": {"lengths": (190, 40, 0, 33), "new": (70, 40, 0, 5)},
}

LEVELS = {
    "block_size": (1, 8, 16, 32, 64, 128),
    "storage": tuple(STORAGE),
    "head_dim": (64, 80, 96, 128, 256),
    "group": (1, 3, 4, 8),
    "kv_heads": (1, 3, 8),
    "batch": tuple(BATCHES),
    "window": (None, 5, "block", 37),
    "soft_cap": (None, 3.0),
    "sinks": (False, True),
    "width": (None, 257),
}


def case_of(row: dict) -> Case:
    options = {name: level for name, level in row.items() if name not in ("storage", "batch")}
    options["window"] = row["block_size"] if row["window"] == "block" else row["window"]
    return Case(**options, **STORAGE[row["storage"]], **BATCHES[row["batch"]])


ROWS = pairwise(LEVELS)
CASES = {
    "{storage}, {batch}, block {block_size}, head_dim {head_dim}, {kv_heads}x{group} heads".format(**row): case_of(row) for row in ROWS
} | {
    "table width 1": Case((16, 3, 0), width=1, dtype="bfloat16", head_dim=128),
    "table width 3": Case((48, 3, 33), new=(20, 3, 1), width=3, dtype="bfloat16", head_dim=128),
    "table width 7": Case((112, 0, 100), width=7, dtype="int8", scaled=True, head_dim=128),
    "words, block size 1": Case((130, 0, 7), block_size=1, dtype="bfloat16", kv_heads=8, group=1, head_dim=128),
    "words, block size 4": Case((140, 9, 3), new=(37, 2, 1), block_size=4, dtype="bfloat16", kv_heads=8, group=2, head_dim=128, window=50),
    "many tiles": Case(tuple(range(1, 140, 12)), dtype="bfloat16", head_dim=64, group=1),
    "window far behind": Case((290, 250), new=(40, 1), window=37, dtype="bfloat16", head_dim=128),
    "first token of a chunk just out of the window": Case((299, 300), window=171, head_dim=64),
    "last token of a chunk just ahead of a tile": Case((158, 159), new=(32, 32), head_dim=64),
}


@functools.cache
def problem_of(name: str) -> tuple[Problem, np.ndarray]:
    problem = build(CASES[name], seed=len(name), backend="tpu")
    return problem, expected(problem, *stored(CASES[name], problem))


def check(name: str, mode: str) -> None:
    """Output and storage of one case against the oracle, in one mode of the interpreter."""
    case, (problem, target) = CASES[name], problem_of(name)
    out, storage = attend(mode, problem)
    assert np.isfinite(np.asarray(out)).all()
    assert (error := relative_error(out, target)) <= TOLERANCE[case.dtype], f"relative error {error:.1e}"
    if case.dtype == "int8" and case.scaled:  # the tolerance covers what rounding to 8 bits costs, too
        assert relative_error(out, expected(problem, problem.keys, problem.values)) <= TOLERANCE[case.dtype]
    assert_same_bits(np.asarray(storage.blocks)[1:], np.asarray(problem.after.blocks)[1:])
