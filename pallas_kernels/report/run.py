"""Runs the report's cases in worker processes, for a compiler is set to its target once a process and may take its process down."""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

from pallas_kernels.report.cases import Case
from pallas_kernels.report.row import Row, refused_row
from pallas_kernels.targets import compile_environment, require_compiler, target_named

__all__ = ["run_cases"]


def run_cases(cases: Iterable[Case]) -> Iterator[Row]:
    """Compiles cases one after another and yields the row of each as it is there.

    Each setting has a process of its own: the CUDA plugin keeps the first target that it is told of, and a kernel that it has compiled
    before, for a model that has it too, is not compiled and dumped again. A case that ends the compiler's process gets a row that says so,
    and the next one gets a new process.

    Raises:
      NotImplementedError: the compiler of a target is not installed.
    """
    cases = list(cases)
    for target in dict.fromkeys(case.target for case in cases):
        require_compiler(target_named(target))
    for _, some in itertools.groupby(cases, lambda case: dataclasses.replace(case, kernel="")):
        yield from _run_setting(some)


def _run_setting(cases: Iterable[Case]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="jaxpage-kernels-") as folder, contextlib.ExitStack() as stack:
        worker: subprocess.Popen[str] | None = None
        for case in cases:
            if worker is None:
                worker = stack.enter_context(_worker(pathlib.Path(folder)))
            answer = _ask(worker, case)
            if answer is None:
                status = worker.wait()
                yield refused_row(case, f"the compiler's process ended with status {status}: {_last_line(pathlib.Path(folder))}")
                worker = None
            else:
                yield Row(**json.loads(answer))


@contextlib.contextmanager
def _worker(folder: pathlib.Path) -> Iterator["subprocess.Popen[str]"]:
    dump = folder / "dump"
    dump.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pallas_kernels.report.worker", str(dump)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=compile_environment(dump)
        ) as worker,
    ):
        try:
            yield worker
        finally:
            worker.kill()


def _ask(worker: "subprocess.Popen[str]", case: Case) -> str | None:
    """The worker's answer, or None if it has ended."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        print(json.dumps(dataclasses.asdict(case)), file=worker.stdin, flush=True)
    except BrokenPipeError:
        return None
    return worker.stdout.readline() or None


def _last_line(folder: pathlib.Path) -> str:
    lines = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
