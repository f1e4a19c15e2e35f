"""The TPU kernels in their interpreter, with every copy made at once: what is still in use is overwritten.

With race detection, NaN in every slot that holds no token, and shuffled blocks. A file of its own, so that it runs beside the other mode.
"""

import pytest
from helpers_tpu_attention import CASES, check

pytestmark = pytest.mark.slow  # minutes in the interpreter


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name):
    check(name, "eager")
