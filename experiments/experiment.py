"""What an experiment is, as data, and the parts that its report is made of. It needs nothing that is not in Python itself."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["Experiment", "Part", "Picture", "Point", "Row", "Table", "Verbatim"]

Point = dict[str, Any]
"""What is to be measured, as JSON values. Two points of a configuration differ."""

Row = dict[str, Any]
"""A point and what was measured there, as JSON values, with units in the names."""


class Table(NamedTuple):
    """A table: one line a row, and the columns to show."""

    rows: Sequence[Row]
    columns: Sequence[str]


class Picture(NamedTuple):
    """A matplotlib figure, saved as NAME.png."""

    name: str
    caption: str
    figure: Any


class Verbatim(NamedTuple):
    """A picture made of characters; `coloured` is the same for a terminal that shows colours."""

    text: str
    coloured: str


Part = str | Table | Picture | Verbatim
"""One part of a report; a string is a paragraph."""


class Experiment(NamedTuple):
    """An experiment: a module of this package has one as `EXPERIMENT`.

    Attributes:
      config: a frozen dataclass with defaults for all fields; it raises ValueError for values that make no sense.
      quick: the configuration that `--quick` starts from, a minute or two on two CPU cores.
      points: what a configuration measures, in order.
      measure: measures one point; its row is the point and what this returns.
      report: the report of rows, made of nothing but them.
    """

    config: type
    quick: Any
    points: Callable[[Any], Iterable[Point]]
    measure: Callable[[Any, Point], Row]
    report: Callable[[Any, Sequence[Row]], Iterable[Part]]
