"""Compile targets: their numbers fit together, and the compiler is there for each of them."""

import importlib.metadata
import json
import pathlib
import subprocess
import sys

import jax
import pytest

from pallas_kernels import targets
from pallas_kernels.targets import TARGETS, GpuTarget, compile_environment, compile_for, target_named

TPUS = [name for name, target in TARGETS.items() if target.platform == "tpu"]
GPUS = [target for target in TARGETS.values() if isinstance(target, GpuTarget)]

PROBE = """
import json, pathlib, sys
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from pallas_kernels.targets import compile_for, target_named
from pallas_kernels.tpu.bundles import read_program

folder, name, size = pathlib.Path(sys.argv[1]), sys.argv[2], 256
target = target_named(name)

def kernel(a, b, out):
    out[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

def multiply(a, b):
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((size, size), jnp.float32), name="probe")(a, b)

operand = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
compiled = compile_for(target, multiply, operand, operand)
program = read_program(folder, "probe", target.delay_slots)
print(json.dumps({
    "kind": str(compiled.input_shardings[0][0].mesh.devices.flat[0].device_kind),
    "flops": 2 * size**3,
    "rows": sum(piece.rows for piece in program.pieces),
    "pushes": sum(piece.pushes for piece in program.pieces),
    "vmem": program.memory["vmem"],
}))
"""


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_assumed_clock_gives_the_data_sheets_flops(target):
    assert target.clock * target.matrix_flops == pytest.approx(target.flops, rel=0.01)


def test_names_and_kinds_of_devices_are_different():
    assert len({target.device_kind for target in TARGETS.values()}) == len(TARGETS)


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_the_numbers_of_a_gpu_fit_together(target):
    architecture = target.architecture
    assert architecture.sm_shared_memory - architecture.shared_memory == 1024  # what CUDA takes of each program
    assert target.fp8_flops is None or target.fp8_flops == pytest.approx(2 * target.flops, rel=0.01)
    assert (target.fp8_flops is None) == (architecture.capability < (8, 9))


def test_occupancy_is_that_of_nvidias_calculator():
    h100, l4 = TARGETS["h100"], TARGETS["l4"]
    assert h100.occupancy(threads=128, registers=32, shared_bytes=0) == 1  # 16 programs of 4 warps
    assert h100.occupancy(128, 128, 0) == 4 * 128 / 2048  # 16384 registers each
    assert h100.occupancy(128, 129, 0) == 3 * 128 / 2048  # in units of 8 a thread
    assert h100.occupancy(128, 32, 101376) == 2 * 128 / 2048  # 99 KiB and 1 of CUDA's own
    assert h100.occupancy(32, 16, 0) == 32 * 32 / 2048  # no more than 32 programs
    assert l4.occupancy(128, 32, 51200) == 1 * 128 / 1536
    assert l4.occupancy(128, 32, 102400) == 0  # it does not run at all


def test_unknown_targets_are_refused_by_name():
    with pytest.raises(ValueError, match=r"no target 'v9'; known are: v4, v5e, v5p, v6e, tpu7x, a100, l4, h100, h200, b200, rtx-pro-6000"):
        target_named("v9")


@pytest.mark.parametrize(("name", "package"), [("v6e", "libtpu"), ("h100", "jax-cuda13-plugin")])
def test_without_the_compiler_the_message_says_what_to_install(monkeypatch, name, package):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    with pytest.raises(NotImplementedError, match=rf"compiling for {name} needs {package}.*install jaxpage\[aot\]"):
        compile_for(TARGETS[name], lambda x: x, jax.ShapeDtypeStruct((8,), "float32"))


def test_the_environment_keeps_the_flags_that_are_there(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--flag=1")
    assert compile_environment()["LIBTPU_INIT_ARGS"] == "--flag=1"
    environment = compile_environment(pathlib.Path("/dump"))
    assert environment["LIBTPU_INIT_ARGS"].startswith("--flag=1 --xla_jf_dump_to=/dump ")
    assert environment["MOSAIC_GPU_DUMP_TO"] == "/dump"


@pytest.mark.parametrize("name", TPUS)
def test_a_matrix_product_compiles_and_is_counted(tmp_path, name):
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path), name], capture_output=True, text=True, check=False, env=compile_environment(tmp_path)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    probe = json.loads(done.stdout)
    assert probe["kind"] == TARGETS[name].device_kind
    # All FLOPs are rows through the MXUs. A register of the stationary operand holds 16 x 128 values; each is loaded into one MXU or more.
    assert probe["rows"] / targets.MXU_ROWS * TARGETS[name].matrix_flops == probe["flops"]
    assert probe["pushes"] % (256 * 256 // (16 * 128)) == 0 < probe["pushes"]
    assert probe["vmem"] >= 2 * 256 * 256 * 2
