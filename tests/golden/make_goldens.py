"""Makes the tiny golden models with torch and transformers, which the tests themselves do not need.

    python -m pip install torch transformers safetensors tokenizers
    python tests/golden/make_goldens.py

Each family gets a folder with config.json, model.safetensors, the tokenizer files, and logits.npz: token ids and the float32 logits that
transformers computes for them. Weights are drawn much wider than for training, so that a wrong rotation, window, norm or row order shows
in the logits.
"""

import pathlib
import shutil

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

HERE = pathlib.Path(__file__).parent
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=True),
    "llama3_rope": transformers.LlamaConfig(**SIZES, rope_parameters={"rope_theta": 5000.0, **LLAMA3_ROPE}),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=5),
    "qwen2": transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE over the 256 bytes with a few merges and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("Ġ", "a")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = alphabet + special + [left + right for left, right in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[2], extra_special_tokens=special[1:2]
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def make(name: str, config: transformers.PretrainedConfig, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """Writes the folder of one family."""
    torch.manual_seed(0)
    config.vocab_size = len(tokenizer)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
        tokens = torch.randint(0, len(tokenizer), (2, 24))
        logits = model(tokens, use_cache=False).logits
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    np.savez_compressed(folder / "logits.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())


if __name__ == "__main__":
    for family, family_config in FAMILIES.items():
        make(family, family_config, make_tokenizer())
