"""Prefill of whole prompts from the host, in passes of bucketed size."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxpage import decode
from jaxpage.buckets import TOKEN_BUCKETS, bucket
from jaxpage.completion import Transcript
from jaxpage.kv_cache import KVCache, reserve
from jaxpage.model import CausalModel
from jaxpage.programs import Programs

__all__ = ["prefill_prompts"]


def prefill_prompts(
    programs: Programs, model: CausalModel, cache: KVCache, transcripts: Sequence[Transcript], *, implementation: str | None
) -> KVCache:
    """Puts all prompts but their last tokens into the cache. The decode loop takes the last ones: there the first token is sampled.

    Args:
      programs: where compiled programs are kept.
      model: the model.
      cache: an empty cache that has room for the prompts; donated.
      transcripts: one for each row in use; gets the log-probabilities of its prompt where it asked for them.
      implementation: see `jaxpage.paged_attention`.
    """
    lengths = np.zeros(cache.table.lengths.shape[0], np.int32)
    lengths[: len(transcripts)] = [len(transcript.prompt_ids) - 1 for transcript in transcripts]
    cache, ok = programs.run(reserve, cache, jnp.asarray(lengths), donate=(0,))
    if not bool(jnp.all(ok)):
        raise RuntimeError("an admitted batch does not fit the pool")
    scored = any(transcript.params.prompt_logprobs for transcript in transcripts)
    done = np.zeros_like(lengths)
    while (done < lengths).any():
        # Fill one pass with what is left of the prompts, in row order.
        ends = np.minimum(np.cumsum(lengths - done), TOKEN_BUCKETS[-1])
        starts = np.concatenate([[0], ends]).astype(np.int32)
        counts = np.diff(starts)
        tokens = np.zeros(bucket(int(starts[-1]), TOKEN_BUCKETS), np.int32)
        targets = np.zeros_like(tokens)
        for row, transcript in enumerate(transcripts):
            first, last = done[row], done[row] + counts[row]
            tokens[starts[row] : starts[row + 1]] = transcript.prompt_ids[first:last]
            targets[starts[row] : starts[row + 1]] = transcript.prompt_ids[first + 1 : last + 1]
        done += counts
        cache, scores = programs.run(
            decode.prefill,
            model,
            cache,
            jnp.asarray(tokens),
            jnp.asarray(np.where(counts > 0, done, 0)),
            jnp.asarray(starts),
            *([jnp.asarray(targets)] if scored else []),
            donate=(1,),
            implementation=implementation,
        )
        if scored:
            scores = np.asarray(scores)
            for row, transcript in enumerate(transcripts):
                transcript.prompt_logprobs.extend(scores[starts[row] : starts[row + 1]].tolist())
    return cache
