"""`jaxpage kernels`."""

import contextlib
import dataclasses
import json
import pathlib

import tqdm

__all__ = ["Kernels"]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Compile the attention kernels for TPUs and GPUs on a machine without one, and print what bounds each. Needs jaxpage[aot]."""

    target: tuple[str, ...] = ()
    """Only these: v4, v5e, v5p, v6e, tpu7x, or tpu for all of them; a100, l4, h100, h200, b200, rtx-pro-6000, or gpu."""
    kernel: tuple[str, ...] = ()
    """Only these kernels, by their names in the report."""
    shape: tuple[str, ...] = ()
    """Only these models' attention layers: smollm2-135m, llama-3.2-1b, llama-3-8b, llama-3-70b/8, qwen3-32b, gemma-3-27b."""
    quick: bool = False
    """Two TPUs, two GPUs, two models, blocks of 16 and bfloat16: two minutes, not an hour."""
    json: pathlib.Path | None = None
    """Write one JSON line a row to this file."""
    plot: pathlib.Path | None = None
    """Draw the roofline of each target, with the kernels in it, to this image file."""

    def run(self) -> None:
        """Compiles with a progress bar on stderr, then prints Markdown."""
        # Pallas and matplotlib take seconds to import, which the other commands should not wait for.
        from pallas_kernels import report

        cases = report.select_cases(self.target, self.kernel, self.shape, quick=self.quick)
        if self.plot:
            from jaxpage.cli import roofline

            roofline.check_path(self.plot)
        rows = []
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self.json.open("w", encoding="utf-8")) if self.json else None
            for row in tqdm.tqdm(report.run_cases(cases), total=len(cases), unit="kernel", disable=None, leave=False):
                rows.append(row)
                if output:
                    print(json.dumps(dataclasses.asdict(row)), file=output, flush=True)
        print(report.markdown(rows), end="")
        if self.plot:
            roofline.draw(rows, self.plot)
