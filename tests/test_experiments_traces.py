"""Lengths and traces: what is drawn, what is read, and what a broken file gives."""

import pathlib

import numpy as np
import pytest

from experiments.lengths import DISTRIBUTIONS, load_lengths
from experiments.traces import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
MOONCAKE = (
    '{"timestamp": 27482, "input_length": 1000, "output_length": 52, "hash_ids": [0, 1]}\n'
    '{"timestamp": 30535, "input_length": 700, "output_length": 26, "hash_ids": [0, 2]}\n'
)


def write(tmp_path: pathlib.Path, name: str, text: str) -> pathlib.Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_azure(tmp_path):
    trace = read_trace(write(tmp_path, "a.csv", AZURE))
    np.testing.assert_allclose(trace.arrival_s, [0, 4.314579], atol=1e-5)
    assert trace.prompt_tokens.tolist() == [374, 396] and trace.output_tokens.tolist() == [44, 109] and not trace.prefix_ids
    assert load_lengths(str(tmp_path / "a.csv"), 1, 0).total.tolist() == [418, 505]  # a trace is taken whole


def test_mooncake(tmp_path):
    trace = read_trace(write(tmp_path, "m.jsonl", MOONCAKE))
    np.testing.assert_allclose(trace.arrival_s, [0, 3.053])
    assert trace.prompt_tokens.tolist() == [1000, 700] and trace.prefix_ids == [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.csv", AZURE.replace("ContextTokens", "Context"), "a.csv, line 1: there is no column 'ContextTokens'"),
        ("a.csv", AZURE.replace("396", "many"), "a.csv, line 3: invalid literal"),
        ("a.csv", AZURE.replace(",109", ""), "a.csv, line 3: the row has more or fewer values than the header"),
        ("a.csv", AZURE.replace(",109", ",109,1"), "a.csv, line 3: the row has more or fewer values than the header"),
        ("a.csv", AZURE.replace("374", "-374"), "a.csv, line 2: times and numbers of tokens must not be negative"),
        ("a.csv", AZURE.replace("2023-11-16 18:15:46.6805900", "noon"), "a.csv, line 2: Invalid isoformat string"),
        ("a.csv", AZURE.partition("\n")[0], "a.csv has no requests"),
        ("a.csv", "", "a.csv has no requests"),
        ("m.jsonl", MOONCAKE.replace("[0, 2]", "[0, 2"), "m.jsonl, line 2: "),
        ("m.jsonl", MOONCAKE.replace('"hash_ids": [0, 2]', '"ids": []'), "m.jsonl, line 2: a request of Mooncake is an object with"),
        ("m.jsonl", MOONCAKE.replace("[0, 2]", '"x"'), "m.jsonl, line 2: hash_ids must be a list"),
        ("m.jsonl", MOONCAKE.replace("700", '"700"'), "m.jsonl, line 2: timestamp, input_length and output_length must be numbers"),
        ("m.jsonl", "\n", "m.jsonl has no requests"),
        ("m.jsonl", "3\n", "m.jsonl, line 1: a request of Mooncake is an object"),
        ("t.txt", "", "t.txt: a trace must be one of .csv, .jsonl"),
    ],
)
def test_broken_traces_name_the_line(tmp_path, name, text, message):
    with pytest.raises(ValueError) as error:
        read_trace(write(tmp_path, name, text))
    assert message in str(error.value)


def test_short_chats_have_190_tokens_in_the_mean():
    assert load_lengths("short_chat", 20_000, 0).total.mean() == pytest.approx(190, rel=0.02)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_repeat_and_are_positive(name):
    one, again, other = (load_lengths(name, 50, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.total, again.total)
    assert one.prompt.min() >= 1 and one.output.min() >= 1
    assert name == "five_users" or not np.array_equal(one.total, other.total)
