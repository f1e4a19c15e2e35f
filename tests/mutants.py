"""Plants faults into copies of the TPU kernels, one at a time, and runs the fastest tests that should catch each.

A race detector alone misses much, so what the tests are worth shows only here. Each fault's tests run with copies made at once and made
late, in a process of its own, because a fault can hang it. Exits with 1 if a fault survives, or if the tests fail without any.
Arguments: parts of the names of the faults to plant; none: all.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
MODES = ("eager", "on_wait")
CAUGHT = {"wrong values", "race or bad access", "hung"}  # any other error would be one of the fault's own

_ATTENTION = "tests/test_tpu_attention_{}.py::test_agrees_with_the_oracle"
DECODE = f"{_ATTENTION}[many tiles]"
PREFILL = f"{_ATTENTION}[last token of a chunk just ahead of a tile]"
WINDOW = f"{_ATTENTION}[first token of a chunk just out of the window]"
SCALED = f"{_ATTENTION}[table width 7]"
NOTHING_SEEN = "tests/test_tpu_kernels.py::test_rows_that_see_nothing_beside_rows_that_do[{}]"
WRITE = "tests/test_tpu_write.py::test_new_tokens_land_in_their_slots[bfloat16, block 16, 1x64, decode-{}]"


class Fault(NamedTuple):
    """`edits` are (module, text, replacement); each text must be there exactly once."""

    name: str
    test: str
    edits: tuple[tuple[str, str, str], ...]


def fault(name: str, test: str, module: str, text: str, replacement: str) -> Fault:
    return Fault(name, test, ((module, text, replacement),))


def no_wait(name: str, test: str, module: str, copy: str) -> Fault:
    return fault(f"no wait for {name}", test, module, f"{copy}.wait()", copy)


KEYS = " = _load(spec, buffers.kv, part, unit * plan.key_column, plan.unit_lanes, high=False)"
VALUES = " = _load(spec, buffers.kv, part, plan.value_column + unit * plan.key_column, plan.unit_lanes, high=True)"

FAULTS = [
    no_wait("keys and values", DECODE, "steps", "buffers.kv_sem.at[slot])"),
    fault("a block not waited for", DECODE, "steps", "first, last - first)]", "first, jnp.maximum(last - first - 1, 0))]"),
    no_wait("the first part of the table", DECODE, "kernel", "table_copy(first_tile, chunk, 0)"),
    no_wait("the table", DECODE, "kernel", "table_copy(next_tile, next_chunk, 1 - slot)"),
    no_wait("the queries", DECODE, "kernel", "tile_copy(query_hbm, buffers.tiles, tile, False)"),
    fault("no wait for outputs before their tile is reused", DECODE, "kernel", "wait_outputs(next_tile - RING)", "pass"),
    fault("no wait for the last outputs", DECODE, "kernel", "wait_outputs(stop_tile - back)", "pass"),
    fault("prefetch into the live slot", DECODE, "kernel", "next_tile, next_chunk, 1 - slot)\n\n", "next_tile, next_chunk, slot)\n\n"),
    fault("table prefetch into the live slot", DECODE, "kernel", "after_chunk, slot).start()", "after_chunk, 1 - slot).start()"),
    fault("block id off by one", DECODE, "steps", "buffers.table[slot, 0, index]", "buffers.table[slot, 0, index] - 1"),
    Fault("keys and values swapped", DECODE, (("chunk", f"keys{KEYS}", f"keys{VALUES}"), ("chunk", f"values{VALUES}", f"values{KEYS}"))),
    fault("values of the tail not masked", DECODE, "softmax", "jnp.where(mask.values, values.astype(jnp.float32), 0.0)", "values"),
    fault("hidden tokens weigh in rows that see nothing", NOTHING_SEEN, "softmax", "part > NOTHING / 2", "part >= NOTHING"),
    fault("a query does not see itself", PREFILL, "chunk", "token <= position)", "token < position)"),
    fault("a query sees the next token", PREFILL, "chunk", "token <= position)", "token <= position + 1)"),
    fault("a chunk is full one token early", PREFILL, "chunk", "stop <= work.position[tile] + 1)", "stop <= work.position[tile] + 2)"),
    fault("a window one token wide of the mark", WINDOW, "chunk", "seen &= token > position", "seen &= token >= position"),
    fault("a chunk is full one token behind the window", WINDOW, "chunk", "start > work.position", "start >= work.position"),
    fault("scale of another head", SCALED, "chunk", "unit * plan.unit_heads + index", "unit * plan.unit_heads"),
    fault("scale of the key for the value", SCALED, "chunk", "spec.form.num_kv_heads, part)", "0, part)"),
    no_wait("the old slots of a write", WRITE, "write", "fetch(item)"),
    no_wait("the new tokens of a write", WRITE, "write", "fresh(item)"),
    no_wait("a store before its unit is reused", WRITE, "write", "store(item + 1 - _RING)"),
    no_wait("the last stores", WRITE, "write", "store(total - back)"),
    fault("offset of a write off by one", WRITE, "write", "lax.rem(writes.offset[item], unit)", "lax.rem(writes.offset[item] + 1, unit)"),
    fault("a write beyond the table is clipped", WRITE, "work", " & (column < width)", ""),
]


def plant(planted: Fault, folder: pathlib.Path, package: str) -> None:
    """A copy of the kernels with the fault in it."""
    shutil.copytree(ROOT / "pallas_kernels", folder / "pallas_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for module, text, replacement in planted.edits:
        path = folder / "pallas_kernels" / package / f"{module}.py"
        source = path.read_text(encoding="utf-8")
        if source.count(text) != 1:
            raise SystemExit(f"error: {planted.name}: {path.name} holds {text!r} {source.count(text)} times, not once")
        path.write_text(source.replace(text, replacement), encoding="utf-8")


def run(tests: list[str], folder: pathlib.Path, limit: float) -> dict[str, str]:
    """What became of each test with the kernels in a folder: passed, hung, did not run, or the error it failed with."""
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "400",
    }
    command = [sys.executable, "-m", "pytest", "-v", "-rf", "--tb=line", "--color=no", "-p", "no:cacheprovider", *tests]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    return {test: outcome(test, text) for test in tests}


def outcome(test: str, text: str) -> str:
    if failed := re.search(rf"^FAILED {re.escape(test)} - (\S+)", text, flags=re.MULTILINE):
        error = failed[1].rstrip(":").split(".")[-1]
        return {"assert": "wrong values", "AssertionError": "wrong values", "JaxRuntimeError": "race or bad access"}.get(error, error)
    started = re.search(rf"^{re.escape(test)} ?(PASSED)?", text, flags=re.MULTILINE)
    return "did not run" if started is None else "passed" if started[1] else "hung"


def main(faults: list[Fault], package: str, modes: tuple[str, ...], words: list[str]) -> int:
    """Plants faults in modules of one package of kernels, and reports. `modes` fill the gap in the names of the tests."""
    chosen = [each for each in faults if not words or any(word in each.name for word in words)]
    tests = {each.test: [each.test.format(mode) for mode in modes] for each in chosen}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        plant(Fault("no fault", "", ()), pathlib.Path(folder), package)
        outcomes = run([test for both in tests.values() for test in both], pathlib.Path(folder), limit=600)
    limit = 30 + time.monotonic() - start  # generous: what ends too late counts as hung
    if failed := [f"{test}: {what}" for test, what in outcomes.items() if what != "passed"]:
        print("the tests fail without a fault:", *failed, sep="\n")
        return 1
    print(f"{'fault':<50} | {' | '.join(f'{mode:<20}' for mode in modes)} | test", flush=True)
    survivors = []
    for each in chosen:
        with tempfile.TemporaryDirectory() as folder:
            plant(each, pathlib.Path(folder), package)
            outcomes = run(tests[each.test], pathlib.Path(folder), limit)
        test = re.sub(r"-?{}", "", each.test.split("::")[1]).removesuffix("[]")
        print(f"{each.name:<50} | {' | '.join(f'{what:<20}' for what in outcomes.values())} | {test}", flush=True)
        if not CAUGHT.intersection(outcomes.values()):
            survivors.append(each.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults caught in {time.monotonic() - start:.0f} s")
    if survivors:
        print("survived:", *survivors, sep="\n")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(FAULTS, "tpu", MODES, sys.argv[1:]))
