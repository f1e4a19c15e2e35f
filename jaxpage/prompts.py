"""Reading prompts from a file: one a line, as text or as JSON Lines."""

import json
import os
import pathlib

__all__ = ["read_prompts"]


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """The prompts of a `.txt` file (one a line) or a `.jsonl` file (one object a line: `{"prompt": "..."}`), in order.

    Blank lines are skipped; a byte order mark and Windows line ends are no part of a prompt.

    Raises:
      ValueError: the name ends in neither, a line does not hold a prompt (the message says which line and why), or no line does.
      OSError: the file cannot be read.
    """
    path = pathlib.Path(path)
    if path.suffix not in _PARSERS:
        raise ValueError(f"{path}: prompts are read from {' or '.join(_PARSERS)} files")
    parse = _PARSERS[path.suffix]
    prompts = []
    # Lines are cut as bytes: str.splitlines would also cut at characters that a prompt may hold, such as U+2028.
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(parse(line.removesuffix(b"\r").decode()))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not UTF-8 (byte {error.start + 1} of the line is {line[error.start]:#04x})"
            ) from error
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts


def _parse_text(line: str) -> str:
    return line


def _parse_json(line: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(entry, dict):
        raise ValueError(f'must be an object {{"prompt": "..."}}, got {line.strip()[:40]}')
    if unknown := sorted(entry.keys() - {"prompt"}):
        raise ValueError(f'unknown key {unknown[0]!r}; the only key is "prompt"')
    if "prompt" not in entry:
        raise ValueError('the key "prompt" is missing')
    prompt = entry["prompt"]
    if not isinstance(prompt, str):
        raise ValueError(f'"prompt" must be a string, got {json.dumps(prompt)[:40]}')
    if not prompt.strip():
        raise ValueError('"prompt" is empty')
    if any("\ud800" <= char <= "\udfff" for char in prompt):
        raise ValueError('"prompt" holds half of a surrogate pair, which is no character')
    return prompt


_PARSERS = {".txt": _parse_text, ".jsonl": _parse_json}
