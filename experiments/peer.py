"""Generation and continuous batching by transformers, next to ours and on the same work."""

import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

import jaxpage
from experiments.experiment import Row
from experiments.measure import paired
from models import Decoder

if TYPE_CHECKING:
    from experiments.serving import Arrival

__all__ = ["batching_row", "transformers_process", "transformers_row"]


@contextlib.contextmanager
def transformers_process(python: str) -> Iterator[Callable[[dict], dict]]:
    """The transformers process: a function from a request to its answer."""
    script = os.path.join(os.path.dirname(__file__), "peer_transformers.py")
    process = subprocess.Popen([python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    requests, answers = process.stdin, process.stdout
    assert requests is not None and answers is not None

    def ask(request: dict) -> dict:
        with contextlib.suppress(BrokenPipeError):  # the empty answer tells it better
            print(json.dumps(request), file=requests, flush=True)
        line = answers.readline()
        if not line:
            raise ValueError(f"{python} cannot run transformers; install torch and transformers there or name another --peer-python")
        return json.loads(line)

    try:
        yield ask
    finally:
        process.terminate()
        process.wait()


def _model(model: Decoder, dtype: str) -> dict:
    """What transformers needs to know of a decoder, and how many threads it may use."""
    sizes = model.config
    return {
        "dtype": dtype,
        "threads": os.cpu_count(),
        "sizes": {
            "vocab_size": sizes.vocab_size,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "max_position_embeddings": sizes.max_length,
        },
    }


def transformers_row(model: Decoder, dtype: str, batch: int, ask: Callable[[dict], dict], *, block_size: int, pairs: int, seed: int) -> Row:
    """Tokens per second of whole generations, prompts included, ours and transformers' in turn."""
    prompt_tokens, new_tokens = 128, 32
    request = {**_model(model, dtype), "batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    prompts = np.random.default_rng(seed).integers(0, model.config.vocab_size, (batch, prompt_tokens)).tolist()
    params = jaxpage.SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    decoder = jaxpage.BatchDecoder(model, block_size=block_size, cache_dtype=dtype)

    def ours() -> float:
        start = time.perf_counter()
        tokens = sum(len(update.token_ids) for update in decoder.run(prompts, params))
        assert tokens == batch * new_tokens
        return time.perf_counter() - start

    versions = ask(request)["versions"]
    peer, own, ratios = paired(lambda: ask(request)["seconds"], ours, pairs)
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "transformers_tokens_per_s": batch * new_tokens / peer,
        "jaxpage_tokens_per_s": batch * new_tokens / own,
        "speedup": 1 / statistics.median(ratios),
        "peer": versions,
    }


def batching_row(
    model: Decoder,
    dtype: str,
    arrivals: Sequence["Arrival"],
    ask: Callable[[dict], dict],
    ours: Callable[[], float],
    *,
    num_blocks: int,
    block_size: int,
    tokens_per_pass: int,
    pairs: int,
) -> Row:
    """Tokens per second of requests that are all there at the beginning, ours and those of transformers' continuous batching in turn.

    Args:
      model: whose sizes transformers' model gets.
      dtype: of weights and cache.
      arrivals: the requests.
      ask: see `transformers_process`.
      ours: runs the same requests, and returns the seconds that they took.
      num_blocks: blocks of the peer's KV memory.
      block_size: tokens a block holds.
      tokens_per_pass: most tokens of a pass.
      pairs: runs of each.
    """
    outputs = [each.output_tokens for each in arrivals]
    memory = {"num_blocks": num_blocks, "page_size": block_size, "max_batch_tokens": tokens_per_pass}
    request = {**_model(model, dtype), "prompts": [each.prompt for each in arrivals], "outputs": outputs, "memory": memory}
    versions = ask({**request, "prompts": request["prompts"][:1], "outputs": [1]})["versions"]
    peer, own, ratios = paired(lambda: ask(request)["seconds"], ours, pairs)
    return {
        "requests": len(arrivals),
        "transformers_tokens_per_s": sum(outputs) / peer,
        "jaxpage_tokens_per_s": sum(outputs) / own,
        "speedup": 1 / statistics.median(ratios),
        "speedup_low": 1 / ratios[-1],
        "speedup_high": 1 / ratios[0],
        "peer": versions,
    }
