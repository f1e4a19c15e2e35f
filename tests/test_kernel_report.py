"""The kernel report: its cases, its arithmetic, its worker, and the command that prints it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxpage import cli
from pallas_kernels.report import KERNELS, SHAPES, Case, markdown, run_cases, select_cases
from pallas_kernels.report.read_gpu import Resources, read_gpu, read_resources
from pallas_kernels.report.read_tpu import with_chunk, with_loop
from pallas_kernels.report.row import compiled_row, refused_row
from pallas_kernels.report.shape import Build, Setting, TpuProgram
from pallas_kernels.targets import TARGETS, target_named
from pallas_kernels.tpu.schedule import Chunk, ChunkCost

CASE = Case("ragged_attention decode", "v6e", "llama-3-8b", 16, "bfloat16")
SETTING = Setting(target_named("v6e"), SHAPES["llama-3-8b"], 16, jnp.dtype("bfloat16"))


PROGRAM = TpuProgram("kernel", tokens=1024, chunk=Chunk(64, 1024))


def build(**changes):
    return Build(**{"function": abs, "arguments": (), "stored_bytes": 4096, "matrix_flops": 32768, **changes})


def row_of(compute=1400, mxu=100, copy_start=136, **changes):
    row = compiled_row(CASE, vmem_bytes=2**20, smem_bytes=1024, temp_bytes=0)
    return with_chunk(row, SETTING, build(**changes), PROGRAM, ChunkCost(compute, mxu, copy_start, 20, 0.5, 7))


def test_every_shape_and_every_axis_has_its_cases():
    cases = select_cases()
    assert len(cases) == len(set(cases))
    assert {case.target for case in cases} == set(TARGETS) and {case.kernel for case in cases} == set(KERNELS)
    assert {case.shape for case in cases if case.block_size == 16 and case.kv_dtype == "bfloat16"} == set(SHAPES)
    one = [case for case in cases if (case.target, case.kernel, case.shape) == ("v6e", "kv_write", "llama-3-8b")]
    assert {case.block_size for case in one} == {1, 8, 16, 64, 128}
    assert {case.kv_dtype for case in one} == {"bfloat16", "float32", "int8", "float8_e4m3fn"}


def test_filters_and_quick_narrow_the_cases():
    quick = select_cases(quick=True)
    assert {case.target for case in quick} == {"v6e", "tpu7x", "h100", "b200"}
    assert len([case for case in quick if case.target == "v6e"]) == 2 * len(KERNELS)
    assert {case.kernel for case in quick if case.target == "h100"} == {name for name, platforms in KERNELS.items() if "gpu" in platforms}
    assert {case.target for case in select_cases(["gpu"])} == {"a100", "l4", "h100", "h200", "b200", "rtx-pro-6000"}
    assert {case.target for case in select_cases(["gpu", "v4"], quick=True)} == {"v4", "h100", "b200"}
    with pytest.raises(ValueError, match="there is no jax paged_attention for l4"):
        select_cases(["l4"], ["jax paged_attention"])
    assert select_cases(["v4"], ["kv_write"], ["qwen3-32b"], quick=True) == [Case("kv_write", "v4", "qwen3-32b", 16, "bfloat16")]


def test_a_chunk_bound_by_hbm():
    row = row_of()
    assert row.inner_loop_bundles == 1536 and row.cycles_per_token == 1.5
    assert row.dma_cycles_per_token == pytest.approx(4096 / 1638e9 * 1.75e9)
    assert row.bound == "hbm" and row.predicted_bandwidth_share == pytest.approx(1)
    assert row.intensity == 4 * 32 * 128 / 4096
    assert row.flops_per_second == pytest.approx(1638e9 * row.intensity)


def test_a_chunk_bound_by_compute():
    row = row_of(compute=1024 * 10 - 136)
    assert row.bound == "compute" and row.predicted_bandwidth_share == pytest.approx(row.dma_cycles_per_token / 10)
    assert row.mxu_share == pytest.approx(4 * 32 * 128 / 10 / 524288)


def test_the_mxus_count_where_the_schedule_is_shorter_than_they_take():
    row = row_of(compute=1024, mxu=2048, copy_start=0)
    assert row.compute_bundles == row.inner_loop_bundles == 1024
    assert row.cycles_per_token == 2 and row.mxu_busy == 1


def test_padding_takes_bandwidth_and_gives_none():
    row = row_of(stored_bytes=8192)
    assert row.dma_cycles_per_token == pytest.approx(8192 / 1638e9 * 1.75e9)
    assert row.predicted_bandwidth_share == pytest.approx(0.5)


def test_a_tile_of_queries_multiplies_the_flops():
    one, many = row_of(), row_of(queries=128)
    assert many.intensity == 128 * one.intensity and many.mxu_share == pytest.approx(128 * one.mxu_share)


def test_a_kernel_that_moves_data_has_no_flops():
    row = with_loop(compiled_row(CASE), SETTING, build(queries=0), TpuProgram("kernel"), 200)
    assert (row.cycles_per_token, row.bound, row.mxu_share) == (200, "compute", None)
    assert row.predicted_bandwidth_share == pytest.approx(row.dma_cycles_per_token / 200)


def test_markdown_names_rates_rows_and_reasons():
    pytest.importorskip("libtpu")
    text = markdown([row_of(), refused_row(dataclasses.replace(CASE, target="v4"), "too small")])
    assert "- v6e, one core at 1.75 GHz (assumed): HBM 1638 GB/s, bfloat16 918.0 TFLOP/s, 524288 FLOPs a cycle" in text
    assert "| ragged_attention decode | v6e | llama-3-8b | 16 | bfloat16 | 1.0 | 1.0 | 0.0 | 1400 | 100 | 136 | 20 | 1024 | 1.50 |" in text
    assert text.endswith("- ragged_attention decode, llama-3-8b, block 16, bfloat16: too small (v4)\n")


GPU_CASE = dataclasses.replace(CASE, target="h100")
GPU_SETTING = SETTING._replace(target=target_named("h100"))


def dump(folder, name="anonymous_1", registers=100, spills=(0, 0), shared=99000):
    """What Mosaic GPU leaves of a kernel."""
    (folder / f"{name}.ptxas").write_text(
        f"ptxas info    : Compiling entry function 'anonymous_mosaic_gpu_kernel' for 'sm_90a'\n"
        f"    0 bytes stack frame, {spills[0]} bytes spill stores, {spills[1]} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 2 barriers, 1 bytes smem\n"
    )
    (folder / f"{name}.before_layout_inference.txt").write_text(
        "%96 = gpu.launch async [%16] blocks(%a2, %a3, %a4) in (%a8 = %c8, %a9 = %c1, %a10 = %c8) threads(%a5, %a6, %a7) in "
        f"(%a11 = %c128, %a12 = %c1, %a13 = %c1_0) dynamic_shared_memory_size %c{shared}_i32 {{\n"
    )


def test_resources_are_read_off_the_dump(tmp_path):
    assert read_resources(tmp_path) == []
    dump(tmp_path, spills=(8, 12))
    assert read_resources(tmp_path) == [Resources(100, 20, 99000, 128)]
    (tmp_path / "anonymous_1.ptxas").write_text("nothing of use")
    assert read_gpu(GPU_CASE, GPU_SETTING, build(), tmp_path).reason.startswith("cannot read registers, spills")


def test_a_kernel_that_was_not_dumped_is_not_taken_for_xlas(tmp_path):
    assert read_gpu(GPU_CASE, GPU_SETTING, build(), tmp_path).reason == "no kernel was dumped"


def test_a_gpu_row_takes_the_hungriest_kernel_and_the_data_sheets_rates(tmp_path):
    dump(tmp_path)
    dump(tmp_path, "anonymous_2", registers=40, spills=(4, 4), shared=1000)
    row = read_gpu(GPU_CASE, GPU_SETTING, build(), tmp_path)
    assert (row.registers, row.spill_bytes, row.shared_bytes, row.occupancy) == (100, 8, 99000, 2 * 128 / 2048)
    assert row.bytes_per_token == 4096 and row.flops_per_token == 4 * 32 * 128
    assert row.dma_cycles_per_token / row_clock(row) == pytest.approx(4096 / 3350e9)
    assert row.cycles_per_token / row_clock(row) == pytest.approx(32768 / 989.4e12, rel=0.001)
    assert row.bound == "hbm" and row.flops_per_second == pytest.approx(4 * 3350e9)
    assert read_gpu(GPU_CASE, GPU_SETTING, build(queries=400, matrix_flops=2**24), tmp_path).bound == "compute"


def row_clock(row):
    return TARGETS[row.target].clock


def test_a_kernel_that_does_not_fit_the_target_is_refused_with_the_numbers(tmp_path):
    dump(tmp_path, shared=101377)
    assert read_gpu(GPU_CASE, GPU_SETTING, build(), tmp_path).compiled
    row = read_gpu(dataclasses.replace(CASE, target="l4"), SETTING._replace(target=target_named("l4")), build(), tmp_path)
    assert not row.compiled and row.reason == "takes 101377 bytes of shared memory, and there are 101376"


def test_a_write_by_xla_has_bytes_and_no_kernel(tmp_path):
    row = read_gpu(GPU_CASE, GPU_SETTING, build(queries=0), tmp_path)
    assert (row.compiled, row.registers, row.bound, row.flops_per_token) == (True, None, "hbm", None)


def test_markdown_has_a_section_for_gpus_that_says_that_nothing_ran(tmp_path):
    pytest.importorskip("jax_cuda13_plugin")
    dump(tmp_path)
    row = read_gpu(GPU_CASE, GPU_SETTING, build(), tmp_path)
    refused = [refused_row(dataclasses.replace(CASE, target=name), "too large") for name in ("a100", "l4")]
    text = markdown([row, *refused])
    assert "Nothing here has run on a device" in text and "TPU" not in text
    assert "- h100, 132 SMs at 1.83 GHz (assumed): HBM 3350 GB/s, bfloat16 989.4 TFLOP/s" in text
    assert "| h100 | llama-3-8b | 16 | bfloat16 | 100 | 0 | 96.7 | 12% |  | 4096 | 16384 | 1.223 | 0.033 | hbm |" in text
    assert text.endswith("- ragged_attention decode, llama-3-8b, block 16, bfloat16: too large (a100, l4)\n")


def test_cases_run_in_a_worker_that_may_die():
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu")
    peer = Case("jax ragged_paged_attention", "v6e", "llama-3-70b/8", 16, "bfloat16")
    odd = dataclasses.replace(peer, shape="smollm2-135m")
    unknown = dataclasses.replace(peer, kernel="nothing")
    before, died, refused, after = run_cases([peer, unknown, odd, peer])
    assert not died.compiled and died.reason == "the compiler's process ended with status 1: KeyError: 'nothing'"
    assert not refused.compiled and "num_combined_kv_heads=6" in refused.reason
    assert before == after
    assert before.compiled and before.reason is None and before.bound == "compute"
    assert before.vmem_bytes >= 2 * 1024 * 2 * 128 * 2 and before.temp_bytes == 0
    assert 1 < before.cycles_per_token < 2


@pytest.fixture
def quiet_cli(tmp_path, monkeypatch):
    """The command, with a home of its own and the process's compilation cache left as it was."""
    monkeypatch.setenv("JAXPAGE_HOME", str(tmp_path / "home"))
    before = jax.config.jax_compilation_cache_dir
    yield cli.main
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "v9"], "no target 'v9'; known are: v4"),
        (["--kernel", "flash"], "no kernel 'flash'; known are: ragged_attention decode"),
        (["--shape", "gpt-2"], "no shape 'gpt-2'; known are: smollm2-135m"),
        (["--json", "/nowhere/rows.jsonl"], "/nowhere/rows.jsonl"),
        (["--plot", "/nowhere/picture.png"], "there is no folder /nowhere"),
        (["--plot", "picture.txt"], "cannot draw to picture.txt; known formats are: "),
    ],
)
def test_bad_input_is_one_line(capsys, quiet_cli, arguments, message):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as stopped:
        quiet_cli(["kernels", *arguments])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_the_command_prints_writes_and_draws(capsys, quiet_cli, monkeypatch, tmp_path):
    pytest.importorskip("libtpu")
    pytest.importorskip("matplotlib")
    rows = [dataclasses.replace(row_of(), **dataclasses.asdict(case)) for case in select_cases(["tpu"], quick=True)]
    monkeypatch.setattr("pallas_kernels.report.run_cases", lambda cases: iter(rows[: len(cases)]))
    quiet_cli(["kernels", "--quick", "--target", "tpu", "--json", str(tmp_path / "rows.jsonl"), "--plot", str(tmp_path / "picture.png")])
    assert capsys.readouterr().out == markdown(rows)
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert written == [dataclasses.asdict(row) for row in rows]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
