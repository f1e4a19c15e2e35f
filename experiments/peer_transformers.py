"""The transformers side of decode_bench, a process of its own that may have another Python.

Reads one JSON object a line (dtype, batch, prompt_tokens, new_tokens, and the sizes of the decoder), builds a Llama of those sizes with
random weights, runs `model.generate` and answers {"seconds": ...}. A model is kept as long as dtype and sizes stay the same.
"""

import functools
import json
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


def main() -> None:
    """Answers requests until the input ends."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    for line in sys.stdin:
        request = json.loads(line)
        torch.set_num_threads(request["threads"])
        model = build(request["dtype"], tuple(sorted(request["sizes"].items())))
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
        print(
            json.dumps({"seconds": seconds, "versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}), flush=True
        )


if __name__ == "__main__":
    main()
