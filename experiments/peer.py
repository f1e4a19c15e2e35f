"""Generation by transformers, next to ours and on the same work."""

import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

import numpy as np

import jaxpage
from experiments.experiment import Row
from experiments.measure import paired
from models import Decoder

__all__ = ["transformers_process", "transformers_row"]


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


def transformers_row(model: Decoder, dtype: str, batch: int, ask: Callable[[dict], dict], *, block_size: int, pairs: int, seed: int) -> Row:
    """Tokens per second of whole generations, prompts included, ours and transformers' in turn."""
    prompt_tokens, new_tokens = 128, 32
    sizes = model.config
    request = {
        "dtype": dtype,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
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
    prompts = np.random.default_rng(seed).integers(0, sizes.vocab_size, (batch, prompt_tokens)).tolist()
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
