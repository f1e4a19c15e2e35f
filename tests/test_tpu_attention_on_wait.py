"""The TPU kernels in their interpreter, with every copy made as late as possible: what is not waited for is not there.

With race detection, NaN in every slot that holds no token, and shuffled blocks.
"""

import itertools

import pytest
from helpers_tpu_attention import CASES, LEVELS, ROWS, check

pytestmark = pytest.mark.slow  # minutes in the interpreter


def test_every_two_levels_meet():
    for (a, levels_of_a), (b, levels_of_b) in itertools.combinations(LEVELS.items(), 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(levels_of_a, levels_of_b))


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name):
    check(name, "on_wait")
