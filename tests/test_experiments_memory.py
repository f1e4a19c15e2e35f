"""Waste and sharing through the real pool: the numbers of the classic example, and those of real traces where they are there."""

import os
import pathlib

import numpy as np
import pytest

from experiments import memory, pool_picture
from experiments.prefix_sharing import EXPERIMENT as SHARING
from experiments.prefix_sharing import PrefixSharing
from experiments.waste import EXPERIMENT as WASTE
from experiments.waste import Waste

TRACES = pathlib.Path(os.environ.get("JAXPAGE_TRACES", pathlib.Path(__file__).parent.parent.parent / "shared" / "data"))


def measured(experiment, config):
    return [{**point, **experiment.measure(config, point)} for point in experiment.points(config)]


@pytest.fixture(scope="module")
def waste_rows():
    return measured(WASTE, Waste())


def test_five_users_waste_69_5_percent(waste_rows):
    row = waste_rows[0]
    assert row["system"] == "contiguous, maximum"
    assert (row["reserved_tokens"], row["used_tokens"]) == (640_000, 195_000)
    assert round(row["waste_percent"], 1) == 69.5


def test_the_other_baselines_and_paging(waste_rows):
    by_system = {(row["system"], row["block_size"]): row for row in waste_rows}
    assert by_system["contiguous, power of two", None]["reserved_tokens"] == 16384 + 65536 + 8192 + 128_000 + 32768
    assert by_system["contiguous, foresight", None]["waste_percent"] == 0
    for block_size in (1, 8, 16, 32, 64, 128):
        slots = sum(-(-tokens // block_size) * block_size for tokens in (10_000, 50_000, 5_000, 100_000, 30_000))
        assert by_system["paged", block_size]["reserved_tokens"] == slots


def test_holding_counts_every_batch(monkeypatch):
    rng = np.random.default_rng(0)
    final = rng.integers(1, 500, 300)
    prompts = rng.integers(1, final + 1)
    monkeypatch.setattr(memory, "_SEQS", 64)
    for block_size in (1, 16):
        held = memory.hold([prompts, final], block_size)
        for lengths, each in zip((prompts, final), held, strict=True):
            blocks = np.sum(-(-lengths // block_size))
            assert each == (lengths.sum(), blocks * block_size, blocks)


def test_reservations_are_never_too_short():
    with pytest.raises(ValueError, match="longer than its reservation"):
        memory.hold_reservations(np.asarray([4, 9]), np.asarray([8, 8]))


def test_the_picture_shows_the_pool(waste_rows):
    owners = waste_rows[-1]["owners"]
    assert owners[:3] == [[0, 1, 2, 3, 4]] * 3  # 48 tokens that all share
    for seq, tokens in enumerate(Waste().picture_users):
        assert sum(seq in each for each in owners) == -(-tokens // 16)
    text = pool_picture.pool_text(owners)
    assert text.startswith("# # # A B C D E") and text.count("#") == 3 and text.count("A") == 4
    assert "\x1b[" in pool_picture.pool_text(owners, colours=True)
    assert len({len(line) for line in text.splitlines()}) == 1


def test_a_shared_partial_block_is_copied_for_all():
    owners = pool_picture.small_pool((40, 40), 20, 16)
    assert sum(len(each) > 1 for each in owners) == 1 and sum(bool(each) for each in owners) == 5


@pytest.fixture(scope="module")
def sharing_rows():
    return measured(SHARING, PrefixSharing(users=(100,), model="none"))


def test_100_users_of_50k_tokens_share_3125_blocks(sharing_rows):
    alone, *shared = sharing_rows
    assert alone["blocks_used"] == 313_200 and alone["shared_blocks"] == 0 and alone["kv_tokens"] == 5_010_000
    assert len(shared) == 2
    for row in shared:
        assert row["shared_blocks"] == 3125
        assert row["kv_tokens"] == row["computed_tokens"] == 60_000
        assert int(row["token_factor"]) == 83
        assert row["blocks_used"] == 3125 + 100 * 7


def test_users_through_the_engine_get_the_same_from_less_memory():
    config = PrefixSharing(
        users=(2,), document_tokens=32, model="tiny", engine_users=(1, 3), engine_document_tokens=70, engine_own_tokens=5
    )
    both = measured(SHARING, config)
    rows = [row for row in both if row["part"] == "engine"]
    assert [(row["users"], row["index"]) for row in rows] == [(users, index) for users in (1, 3) for index in ("none", "hash", "radix")]
    for users in (1, 3):
        assert len({row["outputs"] for row in rows if row["users"] == users}) == 1
    alone, hashed, radix = rows[3:]
    assert alone["computed_tokens"] == 3 * 75
    for shared in (hashed, radix):  # four full blocks: the rest of the document is in a block that its first user still fills
        assert shared["computed_tokens"] == 64 + 3 * 11
        assert shared["blocks_used"] == 4 + 3 * 2 and alone["blocks_used"] == 3 * 6
        assert shared["kv_tokens"] <= alone["kv_tokens"] - 2 * 64 + 1
    text = [part for part in SHARING.report(config, both) if isinstance(part, str)]
    assert "Output tokens are the same in all cases" in " ".join(text)


needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}")
SIZES = (1, 8, 16, 32, 64, 128)


@needs_traces
@pytest.mark.parametrize(
    "trace, last_block_waste, at_longest, at_8192",
    [
        ("azure_llm_2023_conv.csv", (0.00, 0.26, 0.54, 1.12, 2.21, 4.38), 9.69, 16.67),
        ("azure_llm_2023_code.csv", (0.00, 0.17, 0.37, 0.73, 1.51, 3.04), 26.47, 25.34),
    ],
)
def test_azure(trace, last_block_waste, at_longest, at_8192):
    config = Waste(lengths=str(TRACES / trace), max_tokens=0, block_sizes=SIZES)
    rows = {(row["system"], row["block_size"]): row for row in measured(WASTE, config) if row["system"] != "picture"}
    assert rows["contiguous, maximum", None]["used_percent"] == pytest.approx(at_longest, abs=0.05)
    for block_size, percent in zip(SIZES, last_block_waste, strict=True):
        assert rows["paged", block_size]["waste_percent"] == pytest.approx(percent, abs=0.05)
    config = Waste(lengths=str(TRACES / trace), max_tokens=8192)
    held = WASTE.measure(config, {"system": "contiguous, maximum", "block_size": None})
    assert held["used_percent"] == pytest.approx(at_8192, abs=0.05)
