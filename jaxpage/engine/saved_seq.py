"""Requests and their news as plain data, to be kept on disk, and the way back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpage.admission import Request
from jaxpage.completion import Completion, Detokenize, TokenLogprob, Transcript
from jaxpage.engine.constraint import AllowedTokens
from jaxpage.engine.seq import Seq
from jaxpage.generate import Update
from jaxpage.prefix.saved import load_match, match_state
from jaxpage.sampling_params import SamplingParams

__all__ = ["load_seq", "load_update", "seq_state", "update_state"]

# Fields of a Seq that are no plain data, or follow from others.
_OBJECTS = ("request", "transcript", "tokens", "parent", "match", "swapped", "allowed_tokens")


def seq_state(seq: Seq) -> dict[str, Any]:
    """A request in the types of JSON, but for its swapped blocks; of its function only that it has one."""
    plain = {field.name: getattr(seq, field.name) for field in dataclasses.fields(seq) if field.name not in _OBJECTS}
    params = seq.request.params
    return plain | {
        "prompt": list(seq.request.prompt),
        "params": {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
        | {"logit_bias": list(params.logit_bias.items())},
        "max_tokens": seq.request.max_tokens,
        "produced": seq.transcript.token_ids,
        "logprobs": seq.transcript.logprobs,
        "prompt_logprobs": seq.transcript.prompt_logprobs,
        "parent": None if seq.parent is None else seq.parent.id,
        "match": None if seq.match is None else match_state(seq.match),
        "constrained": seq.allowed_tokens is not None,
    }


def load_seq(
    state: Mapping[str, Any], eos_ids: Sequence[int], detokenize: Detokenize | None, allowed_tokens: Mapping[int, AllowedTokens]
) -> Seq:
    """The request of such a state, without parent and swapped blocks.

    Raises:
      ValueError: it had a function for its tokens and is given none, or the other way round, or has stop strings and no detokenizer.
    """
    name, prompt, params = state["id"], tuple(state["prompt"]), _load_params(state["params"])
    if state["constrained"] != (name in allowed_tokens):
        raise ValueError(f"request {name} was saved {'with' if state['constrained'] else 'without'} allowed_tokens, so it is restored so")
    if params.stop and detokenize is None:
        raise ValueError(f"request {name} has stop strings, which need a detokenizer")
    transcript = Transcript(name, prompt, params, eos_ids, detokenize)
    transcript.token_ids.extend(state["produced"])
    transcript.logprobs.extend(_load_logprobs(state["logprobs"]))
    transcript.prompt_logprobs[:] = state["prompt_logprobs"]
    plain = {field.name: state[field.name] for field in dataclasses.fields(Seq) if field.name not in _OBJECTS}
    return Seq(
        **plain,
        request=Request(name, prompt, params, state["max_tokens"]),
        transcript=transcript,
        tokens=[*prompt, *transcript.token_ids],
        match=None if state["match"] is None else load_match(state["match"]),
        allowed_tokens=allowed_tokens.get(name),
    )


def update_state(update: Update) -> dict[str, Any]:
    """News in the types of JSON."""
    completion = update.completion
    return update._asdict() | {"completion": None if completion is None else dataclasses.asdict(completion)}


def load_update(state: Mapping[str, Any]) -> Update:
    """The news of such a state."""
    return Update(
        state["prompt_index"], tuple(state["token_ids"]), None if state["completion"] is None else _load_completion(state["completion"])
    )


def _load_completion(state: Mapping[str, Any]) -> Completion:
    scores, prompt_scores = state["logprobs"], state["prompt_logprobs"]
    return Completion(
        state["index"],
        tuple(state["prompt_ids"]),
        tuple(state["token_ids"]),
        state["text"],
        state["finish_reason"],
        None if scores is None else tuple(_load_logprobs(scores)),
        None if prompt_scores is None else tuple(prompt_scores),
    )


def _load_logprobs(state: Sequence[Any]) -> list[TokenLogprob]:
    return [TokenLogprob(token, logprob, tuple((other, score) for other, score in top)) for token, logprob, top in state]


def _load_params(state: Mapping[str, Any]) -> SamplingParams:
    bias = {token: value for token, value in state["logit_bias"]}
    return SamplingParams(**{**state, "logit_bias": bias, "stop_ids": tuple(state["stop_ids"]), "stop": tuple(state["stop"])})
