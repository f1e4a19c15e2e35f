"""Compile targets: their numbers fit together, and the compiler is there for each of them."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

from pallas_kernels import targets
from pallas_kernels.targets import TARGETS, compile_environment, compile_for, target_named

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


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_the_assumed_clock_gives_the_data_sheets_flops(target):
    assert target.clock * target.mxu_flops == pytest.approx(target.flops, rel=0.01)


def test_unknown_targets_are_refused_by_name():
    with pytest.raises(ValueError, match=r"no target 'v9'; known are: v4, v5e, v5p, v6e, tpu7x"):
        target_named("v9")


def test_without_libtpu_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"install jaxpage\[aot\]"):
        compile_for(TARGETS["v6e"], lambda x: x, jax.ShapeDtypeStruct((8,), "float32"))


def test_the_environment_keeps_the_flags_that_are_there(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--flag=1")
    assert compile_environment()["LIBTPU_INIT_ARGS"] == "--flag=1"
    assert compile_environment(pathlib.Path("/dump"))["LIBTPU_INIT_ARGS"].startswith("--flag=1 --xla_jf_dump_to=/dump ")


@pytest.mark.parametrize("name", TARGETS)
def test_a_matrix_product_compiles_and_is_counted(tmp_path, name):
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path), name], capture_output=True, text=True, check=False, env=compile_environment(tmp_path)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    probe = json.loads(done.stdout)
    assert probe["kind"] == TARGETS[name].device_kind
    # All FLOPs are rows through the MXUs. A register of the stationary operand holds 16 x 128 values; each is loaded into one MXU or more.
    assert probe["rows"] / targets.MXU_ROWS * TARGETS[name].mxu_flops == probe["flops"]
    assert probe["pushes"] % (256 * 256 // (16 * 128)) == 0 < probe["pushes"]
    assert probe["vmem"] >= 2 * 256 * 256 * 2
