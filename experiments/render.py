"""Parts of a report as Markdown, as HTML, and for the terminal."""

import base64
import functools
import html
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from experiments.experiment import Part, Picture, Table, Verbatim

__all__ = ["cell", "html_page", "html_parts", "markdown", "terminal"]


def cell(value: Any) -> str:
    """A value of a table: floats with three significant digits or more, a missing value empty."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def _texts(table: Table) -> list[list[str]]:
    return [
        [column.replace("_", " ") for column in table.columns],
        *([cell(row.get(column)) for column in table.columns] for row in table.rows),
    ]


def markdown(parts: Iterable[Part], pictures: str = "") -> str:
    """Parts as Markdown; `pictures` is put before the file names of the pictures."""
    return "\n".join(_markdown(part, pictures) for part in parts)


@functools.singledispatch
def _markdown(part: Any, pictures: str) -> str:
    return f"{part}\n"


@_markdown.register
def _(part: Table, pictures: str) -> str:
    head, *lines = _texts(part)
    return "".join("| " + " | ".join(line) + " |\n" for line in [head, ["---"] * len(head), *lines])


@_markdown.register
def _(part: Picture, pictures: str) -> str:
    return f"![{part.caption}]({pictures}{part.name}.png)\n\n*{part.caption}*\n"


@_markdown.register
def _(part: Verbatim, pictures: str) -> str:
    return f"```text\n{part.text}\n```\n"


def terminal(parts: Iterable[Part], *, colours: bool) -> str:
    """Parts for a terminal: tables with aligned columns, and of the pictures the captions."""
    return "\n".join(_terminal(part, colours) for part in parts)


@functools.singledispatch
def _terminal(part: Any, colours: bool) -> str:
    return f"{part}\n"


@_terminal.register
def _(part: Table, colours: bool) -> str:
    lines = _texts(part)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + "\n" for line in lines)


@_terminal.register
def _(part: Picture, colours: bool) -> str:
    return f"[{part.name}.png] {part.caption}\n"


@_terminal.register
def _(part: Verbatim, colours: bool) -> str:
    return f"{part.coloured if colours else part.text}\n"


def html_parts(parts: Iterable[Part], folder: pathlib.Path) -> str:
    """Parts as HTML; the pictures are read from a folder and kept in the page itself."""
    return "\n".join(_html(part, folder) for part in parts)


@functools.singledispatch
def _html(part: Any, folder: pathlib.Path) -> str:
    text = html.escape(str(part), quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return f"<p>{re.sub(r'\*\*([^*]+)\*\*', r'<strong>\1</strong>', text)}</p>"


@_html.register
def _(part: Table, folder: pathlib.Path) -> str:
    head, *lines = _texts(part)
    rows = [f"<tr>{''.join(f'<th>{html.escape(text)}</th>' for text in head)}</tr>"]
    rows += [f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in line)}</tr>" for line in lines]
    return f'<div class="table"><table>{"".join(rows)}</table></div>'


@_html.register
def _(part: Picture, folder: pathlib.Path) -> str:
    data = base64.b64encode((folder / f"{part.name}.png").read_bytes()).decode()
    caption = html.escape(part.caption)
    return f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'


@_html.register
def _(part: Verbatim, folder: pathlib.Path) -> str:
    return f"<pre>{html.escape(part.text)}</pre>"


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
figure { margin: 1rem 0; } img { max-width: 100%; } figcaption { color: #555; font-size: 14px; }
pre { line-height: 1.15; overflow-x: auto; }
"""


def html_page(title: str, body: str) -> str:
    """A page that needs no other file."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )
