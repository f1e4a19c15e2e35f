"""The transformers side of decode_bench and engine_bench, a process of its own that may have another Python.

Reads one JSON object a line, builds a Llama of the sizes that it names with random weights, and answers {"seconds": ...}: of
`model.generate` for batch, prompt_tokens and new_tokens; of continuous batching for prompts, outputs and the sizes of its memory. A model
is kept as long as dtype and sizes stay the same.
"""

import functools
import json
import logging
import sys
import time
import warnings

import torch
import transformers


@functools.lru_cache(maxsize=1)
def build(dtype: str, sizes: tuple[tuple[str, int], ...]) -> torch.nn.Module:
    """A Llama with random weights: speed does not depend on their values."""
    config = transformers.LlamaConfig(**dict(sizes), tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def generate(model: torch.nn.Module, request: dict) -> float:
    """Seconds of `model.generate`."""
    prompts = torch.randint(0, request["sizes"]["vocab_size"], (request["batch"], request["prompt_tokens"]))
    count = request["new_tokens"]
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - start
    assert out.shape[1] == request["prompt_tokens"] + count
    return seconds


def serve(model: torch.nn.Module, request: dict) -> float:
    """Seconds of continuous batching, from the first request to the last result.

    It is what `model.generate_batch` runs, which takes one output length for all.
    """
    choice = transformers.GenerationConfig(do_sample=False, max_new_tokens=max(request["outputs"]), eos_token_id=-1, pad_token_id=0)
    memory = transformers.ContinuousBatchingConfig(**request["memory"], allow_block_sharing=False)
    left = {str(number): count for number, count in enumerate(request["outputs"])}
    with model.continuous_batching_context_manager(generation_config=choice, continuous_batching_config=memory) as manager:
        start = time.perf_counter()
        for prompt, (name, count) in zip(request["prompts"], left.items(), strict=True):
            manager.add_request(prompt, request_id=name, max_new_tokens=count, eos_token_id=-1)
        while left:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("continuous batching ended before its requests did")
            elif result.is_finished():
                assert result.error is None and len(result.generated_tokens) == left.pop(result.request_id), result
        return time.perf_counter() - start


def main() -> None:
    """Answers requests until the input ends."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    for line in sys.stdin:
        request = json.loads(line)
        torch.set_num_threads(request["threads"])
        model = build(request["dtype"], tuple(sorted(request["sizes"].items())))
        seconds = (serve if "prompts" in request else generate)(model, request)
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        print(json.dumps({"seconds": seconds, "versions": versions}), flush=True)


if __name__ == "__main__":
    main()
