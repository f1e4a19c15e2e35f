"""What commands print of sequences: whole texts, streamed pieces, JSON lines."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO

import jaxpage
from models.tokenizer import StreamDecoder, Tokenizer

__all__ = ["NOTES", "StreamedText", "json_output", "record", "show_completion"]

NOTES = {
    "out_of_blocks": "(cut short: the pool ran out of blocks; raise --num-blocks)",
    "aborted": "(interrupted)",
}
"""What is said of a text that did not end by itself, by the reason."""


@contextlib.contextmanager
def json_output(target: str | None) -> Iterator[TextIO | None]:
    """The file of that name, the terminal for "-", or nothing."""
    if target is None:
        yield None
    elif target == "-":
        yield sys.stdout
    else:
        with open(target, "w", encoding="utf-8") as file:
            yield file


def record(completion: jaxpage.Completion, index: int, sample: int | None, prompt: str) -> dict[str, object]:
    """A completion as a JSON object; `sample` is its number among several of one prompt."""
    entry: dict[str, object] = {
        "index": index,
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(completion.prompt_ids),
        "num_tokens": len(completion.token_ids),
    }
    if sample is not None:
        entry["sample"] = sample
    if completion.logprobs is not None:
        entry["logprobs"] = [token._asdict() for token in completion.logprobs]
    if completion.prompt_logprobs is not None:
        entry["prompt_logprobs"] = list(completion.prompt_logprobs)
    return entry


def show_completion(completion: jaxpage.Completion, name: str, prompt: str) -> str:
    """A prompt and what continues it."""
    lines = [f"[{name}] {prompt}", (completion.text or "").strip()]
    if completion.finish_reason in NOTES:
        lines.append(NOTES[completion.finish_reason])
    return "\n".join(lines) + "\n"


class StreamedText:
    """What of a sequence's text may be shown: all but an end that a stop string may yet cut off."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._held = max(map(len, stop), default=1) - 1
        self._text = ""
        self._shown = 0

    def take(self, update: jaxpage.Update) -> str:
        """The text that can be shown now and has not been yet."""
        if update.completion is None:
            self._text += self._decoder.push(update.token_ids)
            end = len(self._text) - self._held
        else:
            self._text = update.completion.text or ""
            end = len(self._text)
        piece = self._text[self._shown : max(end, self._shown)]
        self._shown += len(piece)
        return piece
