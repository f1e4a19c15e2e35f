"""The tokenizer that a GGUF file embeds, rebuilt as a `tokenizers.Tokenizer`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from models.formats.gguf_file import Section
from models.tokenizer import Tokenizer, add_ends

__all__ = ["PRE_TOKENIZERS", "read_tokenizer"]

# Token types of the file format.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The later families differ from each other only in how many digits stay together.
_LATER = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """How a text is cut before byte-level BPE: each pattern in turn cuts what the ones before it left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: normalizers.Normalizer | None = None


_DIGITS_APART = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_LATER % "{1,3}",), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer((_LATER % "",), normalizer=normalizers.NFC()),
}
"""By `tokenizer.ggml.pre`."""


def read_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer from the metadata of a GGUF file.

    Raises:
      KeyError: a key that is needed is missing.
      ValueError: the kind of tokenizer is not supported, or its tables do not fit together.
    """
    own = Section(metadata, "tokenizer.ggml.")
    kind = own.get("model")
    if kind not in _KINDS:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    tokens = own["tokens"]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens holds {len(tokens) - len(ids)} tokens twice")
    own["token_type"] = own.get("token_type") or [_NORMAL] * len(tokens)
    if len(own["token_type"]) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type holds {len(own['token_type'])} entries for {len(tokens)} tokens")
    named = _named_tokens(own, tokens)

    backend, add_bos = _KINDS[kind](own, ids)
    typed = list(zip(tokens, own["token_type"], strict=True))
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t, k in typed if k in (_UNKNOWN, _CONTROL)])
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False) for t, k in typed if k == _USER_DEFINED])
    add_ends(
        backend,
        named.get("bos_token") if own.get("add_bos_token", add_bos) else None,
        named.get("eos_token") if own.get("add_eos_token", False) else None,
    )
    ends = dict.fromkeys(own[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in own)
    return Tokenizer(backend, tuple(ends), named, metadata.get("tokenizer.chat_template"))


def _named_tokens(own: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {}
    for name, key in keys.items():
        index = own.get(f"{key}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise ValueError(f"tokenizer.ggml.{key}_token_id is {index}, but there are {len(tokens)} tokens")
        if index is not None:
            named[name] = tokens[index]
    return named


def _byte_level(own: Mapping[str, Any], ids: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    name = own.get("pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    pre = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ")) for merge in own["merges"]]
    for merge in merges:
        if len(merge) != 2 or not all(part in ids for part in (*merge, "".join(merge))):
            raise ValueError(f"tokenizer.ggml.merges holds {' '.join(merge)!r}, which is not a pair of tokens that make a token")
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(own: Mapping[str, Any], ids: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    if own.get("remove_extra_whitespaces", False):
        raise ValueError("tokenizer.ggml.remove_extra_whitespaces is not supported: the tokenizer must keep every space")
    unknown = next((token for token, kind in zip(ids, own["token_type"], strict=True) if kind == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=_merges_of_scores(own, ids), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = own.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def _merges_of_scores(own: Mapping[str, Any], ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: any two pieces that make a piece may merge, the best score first."""
    normal = {token for token, kind in zip(ids, own["token_type"], strict=True) if kind == _NORMAL}
    found = []
    for token, score in zip(ids, own["scores"], strict=True):
        if token in normal:
            cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
            found += [(-score, len(left), left, right) for left, right in cuts if left in normal and right in normal]
    return [(left, right) for _, _, left, right in sorted(found)]


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
