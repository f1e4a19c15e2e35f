"""The check for a machine with a GPU, in its dry form: it works, it needs JAX and NumPy alone, and it sees what is wrong."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import jaxlib
import ml_dtypes
import numpy as np
import opt_einsum
import oracle as tests_oracle
import pytest
import scipy

import jaxpage
from experiments import device_check, tune_tiles
from experiments.device_check_decode import CONTENDERS, DRY_POINTS, POINTS, decode_rows
from experiments.device_check_kernels import CASES, Case, build, check_case, oracle
from experiments.tune_tiles import TuneTiles, best_tiles, write_tiles
from pallas_kernels.tiles import GpuTiles, gpu_tiles, try_gpu_tiles

ROOT = pathlib.Path(__file__).parent.parent
JAX_AND_WHAT_IT_NEEDS = (jax, jaxlib, ml_dtypes, np, opt_einsum, scipy)


@pytest.fixture
def only_jax(tmp_path) -> dict[str, str]:
    """The environment of a Python that has JAX, what JAX needs, and nothing else."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for module in JAX_AND_WHAT_IT_NEEDS:
        package = pathlib.Path(module.__file__).parent
        for path in (package, package.with_name(f"{package.name}.libs")):
            if path.exists():
                (folder / path.name).symlink_to(path)
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"}


def test_the_dry_form_runs_with_jax_and_numpy_alone(tmp_path, only_jax):
    output = tmp_path / "found.json"
    command = [sys.executable, "-S", "-m", "experiments.device_check", "--dry", "--json", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=only_jax, cwd=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads(output.read_text())
    assert found["dry"] and found["copy_bytes_per_second"] > 0
    states = {check["case"]: check["state"] for check in found["checks"]}
    assert states["decode"] == states["decode, window"] == "right"
    assert set(states.values()) <= {"right", "refused"}
    rates = {row["contender"]: row["bytes_per_second"] for row in found["decode"]}
    assert set(rates) == set(CONTENDERS) and rates["jaxpage"] > 0 and rates["xla contiguous"] > 0 and rates["jax triton"] > 0
    last = done.stdout.splitlines()[-3:]
    assert last[-1].startswith(f"written to {output}") and last[0].split()[:3] == ["shape", "batch", "context"]
    assert last[1].split()[:3] == ["tiny", "2", "64"]


def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as stopped:
        device_check.main([])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "device_check: error: needs an NVIDIA GPU, this host has cpu; --dry runs on a CPU\n"


MIXED = Case((20, 0, 9), (5, 0, 9), kv_heads=2, group=3, head_dim=16, window=7, soft_cap=2.0, sinks=True, block_size=8)


@pytest.mark.parametrize("case", [MIXED, dataclasses.replace(MIXED, new=None)], ids=["mixed", "decode"])
def test_its_oracle_is_the_tests_oracle(case):
    problem = build(case, seed=3)
    q, _, _, _, table, lengths, starts = problem.arguments
    expected = tests_oracle.paged_attention(q, problem.keys, problem.values, table, lengths, starts, **problem.options)
    np.testing.assert_allclose(oracle(problem), expected, atol=1e-12)


def test_the_poison_is_set_and_blocks_are_shuffled():
    problem = build(CASES["decode, block 16"], seed=1)
    _, _, _, storage, table, lengths, _ = problem.arguments
    held = int(np.isfinite(np.asarray(storage.blocks[..., 0, 0], np.float32)).sum())
    assert held == int(lengths.sum()) - int((lengths > 0).sum())  # the newest token of each is still to be written
    row = np.asarray(table)[9, : 1000 // 16]
    assert len(set(row)) == len(row) and (np.diff(row) != 1).any()


@pytest.mark.parametrize("fault", ["out", "pool"])
def test_a_wrong_kernel_is_seen(monkeypatch, fault):
    def broken(q, k, v, storage, *arguments, implementation, **options):
        out, after = right(q, k, v, storage, *arguments, implementation=implementation, **options)
        return (out * 1.01, after) if fault == "out" else (out, storage)

    right = jaxpage.paged_attention
    case = Case((17,), kv_heads=1, head_dim=64)
    assert check_case("decode", case, 0)["state"] == "right"
    monkeypatch.setattr(jaxpage, "paged_attention", broken)
    assert check_case("decode", case, 0)["state"] == "wrong"


def test_past_the_deadline_nothing_is_begun():
    rows = list(decode_rows(DRY_POINTS, 1e9, 0.0, 0))
    assert {row["reason"] for row in rows} == {"out of time"} and len(rows) == len(CONTENDERS)


def test_what_is_measured_on_a_device():
    assert {point.batch for point in POINTS} == {1, 16, 64, 256} and {point.context for point in POINTS} == {1024, 8192, 32768}
    assert {point.block_size for point in POINTS} == {16, 64} and len({point.shape for point in POINTS}) == 2
    assert len(set(POINTS)) == 2 * 4 * 3 * 2
    for point in POINTS:
        assert point.num_layers == 16 or point.num_layers * point.layer_bytes >= 256 * 2**20


def test_the_tiles_that_are_closest_to_the_best_everywhere_win():
    even, fast, slow = GpuTiles(1, 1, 1), GpuTiles(2, 1, 1), GpuTiles(3, 1, 1)
    best, ratios = best_tiles({even: [1.1, 1.1], fast: [1.0, 2.0], slow: [3.0, 1.0]})
    assert best == even and ratios[fast] == pytest.approx(2**0.5)


def test_tuned_tiles_are_added_to_the_file(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text('{"default": {"decode_bytes": 1, "programs_per_sm": 2, "fewest_tiles": 3}}')
    write_tiles(path, "NVIDIA X", GpuTiles(4, 5, 6))
    write_tiles(path, "NVIDIA X", GpuTiles(7, 8, 9))
    assert json.loads(path.read_text()) == {
        "default": {"decode_bytes": 1, "programs_per_sm": 2, "fewest_tiles": 3},
        "NVIDIA X": {"decode_bytes": 7, "programs_per_sm": 8, "fewest_tiles": 9},
    }
    assert path.read_text().count("\n") == 4


def test_tuning_runs_dry_and_writes_nothing(capsys, tmp_path):
    tune_tiles.run(TuneTiles(output=tmp_path / "gpu.json", dry=True))
    assert "cpu: GpuTiles(" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()


def test_tuning_without_a_gpu_says_so(capsys):
    with pytest.raises(SystemExit) as stopped:
        tune_tiles.main([])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "tune_tiles: error: needs an NVIDIA GPU, this host has cpu; --dry runs on a CPU\n"


def test_tiles_of_an_unknown_gpu_are_the_default_and_can_be_tried():
    assert gpu_tiles("NVIDIA of next year") == GpuTiles(98304, 2, 4)
    with try_gpu_tiles(GpuTiles(1, 2, 3)):
        assert gpu_tiles("NVIDIA H100 80GB HBM3") == GpuTiles(1, 2, 3)
