"""Reading prompts: what a prompt may hold, and which line a fault is reported on."""

import json
import re

import pytest

from jaxpage.prompts import read_prompts


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_text(write):
    path = write("a.txt", "What is gravity?\n\n   \n  indented, kept \nlast without an end")
    assert read_prompts(path) == ["What is gravity?", "  indented, kept ", "last without an end"]
    assert read_prompts(str(path)) == read_prompts(path)


def test_text_of_other_systems(write):
    assert read_prompts(write("a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n\r\n")) == ["one", "two"]


@pytest.mark.parametrize("char", ["\u2028", "\x0b", "\x0c", "\x85", "\u00a0"])
def test_only_newlines_end_a_prompt(write, char):
    prompt = f"before{char}after"
    assert read_prompts(write("a.txt", f"{prompt}\n")) == [prompt]
    if char > "\x1f":  # JSON wants the others escaped
        assert read_prompts(write("a.jsonl", json.dumps({"prompt": prompt}, ensure_ascii=False))) == [prompt]


def test_json_lines(write):
    path = write("a.jsonl", '{"prompt": "two\\nlines"}\n\n{"prompt": "\\ud83d\\ude00 caf\u00e9"}\r\n')
    assert read_prompts(path) == ["two\nlines", "\U0001f600 caf\u00e9"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff", "not UTF-8 (byte 1 of the line is 0xff)"),
        (b"{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b'"text"', 'must be an object {"prompt": "..."}, got "text"'),
        (b"[1]", 'must be an object {"prompt": "..."}, got [1]'),
        (b"{}", 'the key "prompt" is missing'),
        (b'{"prompt": "a", "seed": 1}', "unknown key 'seed'; the only key is \"prompt\""),
        (b'{"prompt": null}', '"prompt" must be a string, got null'),
        (b'{"prompt": ["a"]}', '"prompt" must be a string, got ["a"]'),
        (b'{"prompt": ""}', '"prompt" is empty'),
        (b'{"prompt": " \\n"}', '"prompt" is empty'),
        (b'{"prompt": "\\ud83d"}', '"prompt" holds half of a surrogate pair, which is no character'),
    ],
)
def test_faults_are_reported_with_file_and_line(write, line, message):
    path = write("bad.jsonl", b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}, line 3: {message}')}$"):
        read_prompts(path)


def test_text_that_is_not_utf8(write):
    path = write("bad.txt", "fine\ncaf\u00e9\n".encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2: not UTF-8 (byte 4 of the line is 0xe9)")):
        read_prompts(path)


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_no_prompts(write, name, content):
    path = write(name, content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: holds no prompts$"):
        read_prompts(path)


@pytest.mark.parametrize("name", ["a.csv", "a", "a.json"])
def test_other_kinds_of_file(write, name):
    with pytest.raises(ValueError, match=r"prompts are read from \.txt or \.jsonl files"):
        read_prompts(write(name, "x"))


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none.txt"))):
        read_prompts(tmp_path / "none.txt")
