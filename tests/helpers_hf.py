"""Writing a loaded model as a Hugging Face folder, to load it again by another way."""

import json
import pathlib

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from models import LoadedModel, ModelConfig


def parameters(loaded: LoadedModel) -> dict[str, np.ndarray]:
    """Every parameter under its dotted path."""
    return {".".join(map(str, path)): np.asarray(param[...]) for path, param in nnx.to_flat_state(nnx.state(loaded.decoder, nnx.Param))}


def hugging_face_tensors(loaded: LoadedModel) -> dict[str, np.ndarray]:
    """The parameters as a Hugging Face checkpoint names and cuts them."""
    config = loaded.decoder.config
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    cuts = {"qkv_proj": (("q_proj", "k_proj", "v_proj"), (heads, heads + kv_heads)), "gate_up_proj": (("gate_proj", "up_proj"), 2)}
    steps = {
        "input_norm": "input_layernorm",
        "post_norm": "post_attention_layernorm",
        "attention": "self_attn",
        "feed_forward": "mlp",
        "embed": "embed_tokens",
    }
    tensors = {}
    for path, value in parameters(loaded).items():
        *module, last, leaf = (steps.get(step, step) for step in path.split("."))
        names, where = cuts.get(last, ((last,), 1))
        for name, part in zip(names, np.split(value, where), strict=True):
            full = ".".join((*module, name, leaf))
            tensors[full if name == "lm_head" else f"model.{full}"] = np.ascontiguousarray(part)
    return tensors


def hugging_face_config(config: ModelConfig) -> dict[str, object]:
    """A `config.json` that says the same, in the older form of the RoPE settings."""
    window = next((window for window in config.windows or () if window is not None), None)
    if config.qk_norm or config.qkv_bias:
        kind, name = ("qwen3", "Qwen3ForCausalLM") if config.qk_norm else ("qwen2", "Qwen2ForCausalLM")
    else:
        kind, name = ("llama", "LlamaForCausalLM") if window is None else ("mistral", "MistralForCausalLM")
    assert config.rope_factors is None
    return {
        "model_type": kind,
        "architectures": [name],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": ["full_attention" if config.window(i) is None else "sliding_attention" for i in range(config.num_layers)],
    }


def write_hugging_face_folder(loaded: LoadedModel, folder: pathlib.Path, shards: int = 1) -> None:
    """Writes config, weights (in so many files) and tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hugging_face_config(loaded.decoder.config)))
    loaded.tokenizer.save(folder)
    tensors = hugging_face_tensors(loaded)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    files = [f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" for shard in range(shards)]
    weight_map = {name: files[index % shards] for index, name in enumerate(tensors)}
    for file in files:
        save_file({name: value for name, value in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
