"""The kernel report: what the TPU compiler makes of our kernels and of their peers, and what bounds each, without a TPU."""

from pallas_kernels.report.cases import SHAPES, Case, Shape, select_cases
from pallas_kernels.report.kernels import KERNELS
from pallas_kernels.report.markdown import markdown
from pallas_kernels.report.row import Row
from pallas_kernels.report.run import run_cases

__all__ = ["KERNELS", "SHAPES", "Case", "Row", "Shape", "markdown", "run_cases", "select_cases"]
