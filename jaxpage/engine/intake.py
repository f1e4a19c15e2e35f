"""What an engine takes in: requests are checked against all that it was made with, and become sequences."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpage.admission import check_requests
from jaxpage.completion import Detokenize, Transcript
from jaxpage.engine.constraint import AllowedTokens
from jaxpage.engine.options import EngineOptions
from jaxpage.engine.seq import Seq
from jaxpage.model import ModelSizes
from jaxpage.sampler_arrays import check_features
from jaxpage.sampling_params import SamplingParams

__all__ = ["Intake"]


class Intake(NamedTuple):
    """What requests are checked against.

    Attributes:
      sizes: the model's.
      options: the engine's.
      eos_ids: token ids at which the model ends its text.
      detokenize: token ids -> text, for stop strings.
    """

    sizes: ModelSizes
    options: EngineOptions
    eos_ids: tuple[int, ...]
    detokenize: Detokenize | None

    def make_seq(
        self,
        name: int,
        arrival: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        priority: int,
        namespace: str,
        allowed_tokens: AllowedTokens | None,
    ) -> Seq:
        """The sequence of a request; see `Engine.submit` for the arguments and what is refused."""
        if not isinstance(namespace, str):
            raise ValueError(f"namespace must be a string, got {namespace!r}")
        if not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        request = check_requests([prompt_ids], params, self.sizes)[0]
        num_blocks, block_size, longest = self.options.num_blocks - 1, self.options.block_size, self.options.longest(self.sizes)
        room = min(longest, num_blocks * block_size)
        if len(request.prompt) > room:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens, max_length is {longest} and the pool holds "
                f"{num_blocks} blocks of {block_size}: it may have {room}"
            )
        check_features(params, self.eos_ids, self.options.features)
        if allowed_tokens is not None and not self.options.features.constrained:
            raise ValueError("allowed_tokens cannot be used here: the feature 'constrained' is off")
        if params.stop and self.detokenize is None:
            raise ValueError("stop strings need a detokenizer")
        request = request._replace(prompt_index=name, max_tokens=min(request.max_tokens, longest - len(request.prompt) + 1))
        transcript = Transcript(name, request.prompt, params, self.eos_ids, self.detokenize)
        return Seq(name, request, transcript, list(request.prompt), priority, namespace, arrival, allowed_tokens=allowed_tokens)
