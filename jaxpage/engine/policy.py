"""In which order waiting sequences are admitted."""

from collections.abc import Callable, Sequence

from jaxpage.engine.seq import Seq

__all__ = ["SCHEDULING", "Hit", "ScheduleKey", "find_scheduling", "first_to_admit"]

Hit = Callable[[Seq], int]
"""Tokens of a sequence that the index has."""

ScheduleKey = Callable[[Seq, Hit], tuple]
"""Sort key of a waiting sequence; the least is admitted first."""

SCHEDULING: dict[str, ScheduleKey] = {
    "fcfs": lambda seq, hit: (seq.arrival,),
    "longest-prefix": lambda seq, hit: (-hit(seq), seq.arrival),
    "priority": lambda seq, hit: (-seq.priority, seq.arrival),
}
"""First come first served; the longest hit first (Zheng et al., 2024); the highest priority first."""


def find_scheduling(name: str) -> ScheduleKey:
    """The policy of a name.

    Raises:
      ValueError: there is none; lists those there are.
    """
    if name not in SCHEDULING:
        raise ValueError(f"no scheduling policy {name!r}; there are: {', '.join(SCHEDULING)}")
    return SCHEDULING[name]


def first_to_admit(waiting: Sequence[Seq], key: ScheduleKey, hit: Hit, max_passed_over: int) -> Seq:
    """The sequence that is admitted next. One that has been passed over too often goes before all that have not, so nobody starves."""

    def order(seq: Seq) -> tuple:
        overdue = seq.passed_over >= max_passed_over
        return (not overdue, *((seq.arrival,) if overdue else key(seq, hit)))

    return min(waiting, key=order)
