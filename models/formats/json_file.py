"""Reading JSON files with errors that name the file."""

import json
from pathlib import Path
from typing import Any

__all__ = ["read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """The object a JSON file holds.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not UTF-8, not JSON or not an object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # a truncated file, or bytes that are not UTF-8
        raise ValueError(f"{path} is not valid JSON ({error}): fetch or write it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
