"""Text to token ids and back, whole or as a stream."""

import codecs
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from models.chat import render_chat
from models.formats.json_file import read_json

__all__ = ["StreamDecoder", "Tokenizer", "add_ends"]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE: itself where it prints, else the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    return bytes(_ALPHABET[char] for char in token)


def _sentencepiece_bytes(token: str) -> bytes:
    return bytes([int(token[3:5], 16)]) if _BYTE_TOKEN.fullmatch(token) else token.replace("▁", " ").encode()


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A `tokenizers.Tokenizer` with what a model adds to it.

    Attributes:
      backend: the tokenizer; its post-processor adds BOS if the model asks for it.
      eos_ids: tokens that end a generation.
      special_tokens: texts of the named special tokens ("bos_token", "eos_token", ...), for chat templates.
      chat_template: jinja2 source, or None.

    Raises:
      ValueError: the backend decodes in a way that is neither byte-level BPE nor SentencePiece BPE.
    """

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chat_template: str | None = None

    def __post_init__(self) -> None:
        # Files are known to carry a truncation or padding from training; neither may touch a prompt.
        self.backend.no_truncation()
        self.backend.no_padding()
        _ = self._scheme

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones too. The model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text. Bytes that the vocabulary has no token for are left out, as the model's makers had it.

        Args:
          text: any text.
          add_special: add BOS (or EOS) where the model asks for it.
          parse_special: read "<|im_start|>" and the like as the special token; False takes it as plain text.
        """
        backend = self.backend if parse_special else self._plain_backend
        return backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD; ids that hold no text, such as padding rows, become nothing."""
        stream = StreamDecoder(self, skip_special)
        return stream.push(ids) + stream.finish()

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation in the model's own format.

        Raises:
          ValueError: the model has no chat template, or it fails; see `render_chat`.
        """
        text = render_chat(self.chat_template, messages, self.special_tokens, add_generation_prompt)
        return self.encode(text, add_special=False)  # a template writes its BOS itself

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; a character may be spread over several tokens."""
        token = self.backend.id_to_token(token_id)
        to_bytes, _ = self._scheme
        if token is None:
            return b""
        # Added tokens are stored as the text they are, not in the byte alphabet.
        return token.encode() if to_bytes is _byte_level_bytes and token_id in self._added else to_bytes(token)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token rather than text."""
        return token_id in self._added and self._added[token_id].special

    @property
    def strips_first_space(self) -> bool:
        """SentencePiece puts a space before a text; decoding takes it away again."""
        return self._scheme[1]

    def save(self, folder: Path) -> None:
        """Writes the files that `load` (and transformers) read."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self.special_tokens}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(self.eos_ids)}), encoding="utf-8")
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8", newline="")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads the tokenizer files of a Hugging Face folder.

        Raises:
          FileNotFoundError: there is no `tokenizer.json`.
          ValueError: a file is broken, or the kind of tokenizer is not supported.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist: save the model's fast tokenizer there (transformers: save_pretrained)")
        read_json(file)  # the backend's own error would not name the file
        backend = tokenizers.Tokenizer.from_file(str(file))
        settings = _optional_json(folder / "tokenizer_config.json")
        named = {key: _token_text(settings[key]) for key in _NAMED_TOKENS if settings.get(key) is not None}
        if "add_bos_token" in settings or "add_eos_token" in settings:
            bos = named.get("bos_token") if settings.get("add_bos_token") else None
            eos = named.get("eos_token") if settings.get("add_eos_token") else None
            add_ends(backend, bos, eos)
        return cls(backend, _eos_ids(folder, backend, named), named, _chat_template(folder, settings))

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # The switch belongs to the whole backend, so a second one keeps `encode` free of shared state.
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self.backend.get_added_tokens_decoder()

    @cached_property
    def _scheme(self) -> tuple[Callable[[str], bytes], bool]:
        """How a token becomes bytes, and whether the first space goes."""
        decoder = self.backend.decoder
        state = {"type": "none"} if decoder is None else json.loads(decoder.__getstate__())
        kinds = [step["type"] for step in state.get("decoders", [state])]
        if kinds == ["ByteLevel"]:
            return _byte_level_bytes, False
        if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
            return _sentencepiece_bytes, "Strip" in kinds
        raise ValueError(f"a tokenizer that decodes with {' + '.join(kinds)} is not supported; supported: byte-level and SentencePiece BPE")


class StreamDecoder:
    """Text of tokens as they come: only whole characters are given out, and all of it together is `Tokenizer.decode` of all tokens."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip_next = tokenizer.strips_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that is complete with them."""
        tokenizer = self._tokenizer
        data = b"".join(tokenizer.token_bytes(i) for i in map(int, ids) if not (self._skip_special and tokenizer.is_special(i)))
        if data and self._strip_next:
            data = data.removeprefix(b" ")
            self._strip_next = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Returns U+FFFD for a character that was never completed, else nothing, and starts anew."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._strip_next = self._tokenizer.strips_first_space
        return text


def add_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Lets a backend put these tokens around every text; None puts none there.

    Raises:
      ValueError: one of them is not in the vocabulary.
    """
    ends = [token for token in (bos, eos) if token is not None]
    for token in ends:
        if backend.token_to_id(token) is None:
            raise ValueError(f"the tokenizer is to put {token!r} around texts, but its vocabulary has no such token")
    template = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)]
    )


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> tuple[int, ...]:
    """From the first file that says it: what generation uses, then what the model says, then the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        ids = _optional_json(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    own = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return () if own is None else (own,)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_bytes().decode()  # as written: newlines are part of the format
    template = settings.get("chat_template")
    # A model may bring several by name, for tools or retrieval.
    return {entry["name"]: entry["template"] for entry in template}.get("default") if isinstance(template, list) else template
