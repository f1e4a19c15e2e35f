"""Constrained output: which tokens a request may choose next, as a function on the host says it."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, UInt32

from jaxpage.completion import Transcript

__all__ = ["AllowedTokens", "next_words"]

AllowedTokens = Callable[[Sequence[int]], np.ndarray]
"""From the tokens that a request has produced so far to those that it may choose next.

The result is one boolean for each token id [V], or the same as bits: int32 or uint32 words [ceil(V / 32)], token t in bit t % 32 of word
t // 32. The function is asked once for each token produced, and again where a sequence starts anew after it gave way. Forks ask the
same function, so what it remembers must follow the tokens that it is given.
"""


def next_words(allowed_tokens: AllowedTokens, transcript: Transcript, vocab_size: int) -> UInt32[np.ndarray, " words"] | None:
    """What a request may choose next, as the bits of `sampling.Constraint`; None where that is nothing.

    Args:
      allowed_tokens: is asked.
      transcript: what the request has produced.
      vocab_size: token ids (V).

    Raises:
      ValueError: the answer is no mask; names the request, its shape and those allowed.
    """
    allowed = _as_booleans(allowed_tokens(tuple(transcript.token_ids)), transcript.index, vocab_size)
    if len(transcript.token_ids) < transcript.params.min_tokens:
        allowed = allowed.copy()
        allowed[list(transcript.stop_ids)] = False  # the sampler bars them too
    if not allowed.any():
        return None
    padded = np.pad(allowed, (0, -vocab_size % 32))
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


def _as_booleans(mask: np.ndarray, request_id: int, vocab_size: int) -> Bool[np.ndarray, " V"]:
    num_words = -(-vocab_size // 32)
    if isinstance(mask, np.ndarray):
        if mask.dtype == np.bool_ and mask.shape == (vocab_size,):
            return mask
        if mask.dtype in (np.int32, np.uint32) and mask.shape == (num_words,):
            return np.unpackbits(mask.astype("<u4").view(np.uint8), count=vocab_size, bitorder="little").astype(bool)
    given = f"{mask.dtype} of shape {mask.shape}" if isinstance(mask, np.ndarray) else repr(mask)
    raise ValueError(
        f"allowed_tokens of request {request_id} must return an array of bool of shape ({vocab_size},) or of int32 or uint32 words of "
        f"shape ({num_words},), got {given}; abort the request to go on"
    )
