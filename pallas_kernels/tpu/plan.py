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
    unit_rows: int
    unit_lanes: int
    key_column: int  # columns from one unit's keys to the next
    value_column: int  # the first unit's values

    def row_offset(self, rows: Rows, slot: int, head: int) -> int:
        """Where a head's queries begin in its unit."""
        return (slot * rows.slot_rows + head) * self.queries


def decode_plan(rows: Rows, form: Format) -> Plan:
    """One query: the units are packs, as wide as their rows allow."""
    lanes = rows.pack_slots * rows.slot_lanes
    return Plan(1, rows.packs, rows.pack_slots, rows.pack_rows, lanes, lanes // LANES, _value_column(form))


def prefill_plan(rows: Rows, form: Format, queries: int) -> Plan:
    """Many queries: they fill the rows, so the units are single slots."""
    return Plan(
        queries, rows.slots, 1, rows.slot_rows * queries, rows.slot_lanes, rows.slot_lanes // LANES, _value_column(form)
    )


def _value_column(form: Format) -> int:
    return 0 if form.interleaved or form.words else form.key_columns
