"""Reads traces of real services: Azure's CSV files and Mooncake's JSON Lines.

Formats: github.com/Azure/AzurePublicDataset (AzureLLMInferenceTrace) and github.com/kvcache-ai/Mooncake.
"""

import csv
import datetime
import json
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np
from jaxtyping import Float, Int

__all__ = ["FORMATS", "Trace", "read_trace"]


class Trace(NamedTuple):
    """Requests in the order of the file.

    Attributes:
      arrival_s: seconds after the first request.
      prompt_tokens: tokens of the prompts.
      output_tokens: tokens that were generated.
      prefix_ids: of each request, the ids of its blocks of 512 prompt tokens, the last of which may be partial. Blocks of one id hold the
        same tokens after the same tokens. Empty where the format has none.
    """

    arrival_s: Float[np.ndarray, " n"]
    prompt_tokens: Int[np.ndarray, " n"]
    output_tokens: Int[np.ndarray, " n"]
    prefix_ids: Sequence[tuple[int, ...]]


class _Request(NamedTuple):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] | None = None


class _Format(NamedTuple):
    rows: Callable[[TextIO], Iterator[tuple[int, Any]]]  # line numbers and rows
    parse: Callable[[Any], _Request]


def read_trace(path: str | pathlib.Path) -> Trace:
    """Reads a trace; the ending of its name says the format.

    Raises:
      ValueError: another ending, no requests, a missing column, or a bad row; says the line.
      OSError: the file cannot be read.
    """
    file = pathlib.Path(path)
    if file.suffix not in FORMATS:
        raise ValueError(f"{file}: a trace must be one of {', '.join(FORMATS)}")
    rows, parse = FORMATS[file.suffix]
    requests = []
    with open(file, encoding="utf-8-sig", newline="") as lines:
        number = 0
        try:
            for number, row in rows(lines):  # noqa: B007 (the error names it)
                requests.append(parse(row))
                if min(requests[-1][:3]) < 0:
                    raise ValueError(f"times and numbers of tokens must not be negative, got {requests[-1][:3]}")
        except (ValueError, TypeError, csv.Error) as error:
            raise ValueError(f"{file}, line {number or 1}: {error}") from error
    if not requests:
        raise ValueError(f"{file} has no requests")
    arrivals, prompts, outputs, ids = zip(*requests, strict=True)
    start = np.asarray(arrivals, np.float64)
    return Trace(start - start.min(), np.asarray(prompts), np.asarray(outputs), [each for each in ids if each is not None])


_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _azure_rows(lines: TextIO) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(lines)
    header = reader.fieldnames or []
    if header and (missing := [column for column in _COLUMNS if column not in header]):
        raise ValueError(f"there is no column {missing[0]!r}; a trace of Azure has {', '.join(_COLUMNS)}, this one {', '.join(header)}")
    for row in reader:
        yield reader.line_num, row


def _azure_request(row: dict[str | None, str | None]) -> _Request:
    values = [row[column] for column in _COLUMNS]
    if None in row or None in row.values():
        raise ValueError("the row has more or fewer values than the header")
    time, prompt, output = map(str, values)
    # The fractions of a second have seven digits; Python takes six of them.
    moment = datetime.datetime.fromisoformat(time).replace(tzinfo=datetime.UTC)
    return _Request(moment.timestamp(), int(prompt), int(output))


def _mooncake_rows(lines: TextIO) -> Iterator[tuple[int, Any]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _mooncake_request(line: str) -> _Request:
    values = json.loads(line)
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    if not isinstance(values, dict) or not values.keys() >= set(keys):
        raise ValueError(f"a request of Mooncake is an object with {', '.join(keys)}; got {line.strip()[:60]}")
    time, prompt, output, ids = (values[key] for key in keys)
    if not all(type(number) in (int, float) for number in (time, prompt, output)):
        raise ValueError(f"timestamp, input_length and output_length must be numbers, got {time!r}, {prompt!r}, {output!r}")
    if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError("hash_ids must be a list of integers from 0 on")
    return _Request(time / 1000, int(prompt), int(output), tuple(ids))


FORMATS: Mapping[str, _Format] = types.MappingProxyType(
    {".csv": _Format(_azure_rows, _azure_request), ".jsonl": _Format(_mooncake_rows, _mooncake_request)}
)
"""The formats by the ending of a file's name."""
