"""Regular expressions, JSON schemas and grammars as constraints of the engine, by llguidance (an optional extra)."""

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from models.tokenizer import Tokenizer

__all__ = ["GrammarCompiler", "GrammarConstraint"]


class GrammarConstraint:
    """The tokens that a grammar allows next: an `allowed_tokens` of `jaxpage.Engine.submit`.

    It follows whatever tokens it is given, back to where they part from the last ones, so forks may share it. Once the text is complete,
    an end of text is allowed; after that, or after tokens that the grammar does not allow, nothing is.
    """

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._consumed: list[int] = []

    def __call__(self, token_ids: Sequence[int]) -> Int32[np.ndarray, " words"]:
        """The mask, one bit a token; see `jaxpage.engine.constraint.AllowedTokens`."""
        same = 0
        while same < min(len(token_ids), len(self._consumed)) and token_ids[same] == self._consumed[same]:
            same += 1
        self._matcher.rollback(len(self._consumed) - same)
        del self._consumed[same:]
        rest = list(token_ids[same:])
        # A token that is not allowed would break the matcher for good.
        if self._matcher.validate_tokens(rest) < len(rest):
            return np.zeros_like(self._mask())
        self._matcher.consume_tokens(rest)
        self._consumed += rest
        return self._mask()

    def _mask(self) -> Int32[np.ndarray, " words"]:
        # llguidance adds a word where the vocabulary fills the last one.
        return np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._num_words]


class GrammarCompiler:
    """Makes constraints for one tokenizer. Keep it: it takes a while to make, and many requests can share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """Reads the vocabulary.

        Args:
          tokenizer: the model's, with at least one end of text.
          vocab_size: the model's token ids (V), which may be more than the tokenizer has.

        Raises:
          ModuleNotFoundError: llguidance is not installed; says how to.
          ValueError: the tokenizer has no end of text, or more tokens than the model.
        """
        try:
            self._library = importlib.import_module("llguidance")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("grammars need llguidance: pip install 'jaxpage[constrained]'") from error
        if not tokenizer.eos_ids:
            raise ValueError("the tokenizer must have an end of text, with which a complete text ends")
        if vocab_size < tokenizer.vocab_size:
            raise ValueError(f"vocab_size must be at least the tokenizer's {tokenizer.vocab_size}, got {vocab_size}")
        self._tokenizer = self._library.LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids))

    def regex(self, pattern: str) -> GrammarConstraint:
        """Text that a regular expression matches as a whole.

        Raises:
          ValueError: llguidance does not take it; says why.
        """
        return self._compile(self._library.LLMatcher.grammar_from_regex(pattern), "regular expression")

    def json_schema(self, schema: Mapping[str, Any]) -> GrammarConstraint:
        """A JSON value of a schema.

        Raises:
          ValueError: llguidance does not take it; says why.
        """
        return self._compile(self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema)), "JSON schema")

    def lark(self, grammar: str) -> GrammarConstraint:
        """Text of a context-free grammar in llguidance's dialect of Lark.

        Raises:
          ValueError: llguidance does not take it; says why.
        """
        return self._compile(self._library.LLMatcher.grammar_from_lark(grammar), "grammar")

    def _compile(self, grammar: str, what: str) -> GrammarConstraint:
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"llguidance does not take this {what}: {matcher.get_error()}")
        return GrammarConstraint(matcher, self._tokenizer.vocab_size)
