"""How tiles of different numbers of queries are computed: data for one kernel, instead of a kernel for each."""

from typing import NamedTuple

from pallas_kernels.tpu.format import LANES, Format
from pallas_kernels.tpu.rows import Rows

__all__ = ["Plan", "decode_plan", "prefill_plan"]


class Plan(NamedTuple):
    """A tile of at most `queries` queries is computed as `units` products of [unit_rows, unit_lanes] with the keys of some tokens.

    A row of a unit is (slot in unit, head in slot, query).
    """

    queries: int
    units: int
    unit_slots: int
    unit_heads: int  # kv heads
    unit_rows: int
    unit_lanes: int
    key_column: int  # columns from one unit's keys to the next
    value_column: int  # the first unit's values
    head_rows: int  # rows that read one kv head


def decode_plan(rows: Rows, form: Format) -> Plan:
    """One query: the units are packs, as wide as their rows allow."""
    lanes = rows.pack_slots * rows.slot_lanes
    return Plan(
        queries=1,
        units=rows.packs,
        unit_slots=rows.pack_slots,
        unit_heads=rows.pack_slots * rows.slot_heads,
        unit_rows=rows.pack_rows,
        unit_lanes=lanes,
        key_column=lanes // LANES,
        value_column=_value_column(form),
        head_rows=rows.group,
    )


def prefill_plan(rows: Rows, form: Format, queries: int) -> Plan:
    """Many queries: they fill the rows, so the units are single slots."""
    return Plan(
        queries=queries,
        units=rows.slots,
        unit_slots=1,
        unit_heads=rows.slot_heads,
        unit_rows=rows.slot_rows * queries,
        unit_lanes=rows.slot_lanes,
        key_column=rows.slot_lanes // LANES,
        value_column=_value_column(form),
        head_rows=rows.group * queries,
    )


def _value_column(form: Format) -> int:
    return 0 if form.interleaved or form.words else form.key_columns
