#!/usr/bin/env python3
"""Makes small models with random weights of each family and kind of rotary embedding, in Hugging Face layout, and
records the logits that transformers computes with them (golden_logits.py):

    make_random_models.py tests/worker/model/testdata

Weights are scaled so that attention is far from uniform, and norms and biases are far from one and zero: a wrong head,
offset or angle changes the logits. All models have 2 KV heads, so that with four ranks each head is on two. The context
that rotary embeddings were "trained" for is short, and the longest run exceeds it. Deterministic. Models that differ only
in config.json share their weights through a link. Needs torch and transformers. Tests use only the recorded files.
"""

import argparse
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import golden_logits  # noqa: E402

LENGTHS = (1, 65, 500, 1100)
TRAINED_CONTEXT, EXTENDED_CONTEXT = 128, 2048
VOCAB = 64
WINDOW = 97

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
ROPE_KINDS = {
    "default": {},
    "linear": {"factor": 16.0},
    "dynamic": {"factor": 16.0},
    "yarn": {"factor": 16.0, "original_max_position_embeddings": TRAINED_CONTEXT},
    "llama3": {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": TRAINED_CONTEXT},
}


@dataclass
class Model:
    family: str
    rope: str = "default"
    config: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    max_shard_size: str = "5GB"
    weights_of: str = ""  # the model whose weights this one shares


MODELS = {
    "llama": Model("llama"),
    "llama-linear": Model("llama", "linear", weights_of="llama"),
    "llama-dynamic": Model("llama", "dynamic", weights_of="llama"),
    "llama-yarn": Model("llama", "yarn", weights_of="llama"),
    "llama3": Model("llama", "llama3", weights_of="llama"),
    "llama-tied": Model("llama", config={"tie_word_embeddings": True}),
    "llama-bias": Model("llama", config={"attention_bias": True}),
    "llama-float16-sharded": Model("llama", dtype=torch.float16, max_shard_size="20KB"),
    "qwen2": Model("qwen2"),
    "qwen2-yarn": Model("qwen2", "yarn", weights_of="qwen2"),
    "qwen3": Model("qwen3"),
    "qwen3-tied": Model("qwen3", config={"tie_word_embeddings": True}),
    # Windows that are no multiple of a page: all layers, the last one, and the first one.
    "mistral-window": Model("mistral", config={"sliding_window": WINDOW}, weights_of="llama"),
    "qwen2-window": Model("qwen2", config={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
                          weights_of="qwen2"),
    "qwen3-window": Model("qwen3", config={"use_sliding_window": True, "sliding_window": WINDOW,
                                           "layer_types": ["sliding_attention", "full_attention"]}, weights_of="qwen3"),
}


def make_config(model):
    return FAMILIES[model.family][0](
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=[1],
        max_position_embeddings=TRAINED_CONTEXT if model.rope == "dynamic" else EXTENDED_CONTEXT,
        rope_parameters={"rope_type": model.rope, "rope_theta": 10000.0, **ROPE_KINDS[model.rope]}, **model.config)


def randomize(network, generator):
    """Gives every parameter values that change the result."""
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1.0 + 0.2 * noise
        elif name.endswith(".bias"):
            value = 0.3 * noise
        elif name.endswith("embed_tokens.weight"):
            value = noise
        else:
            value = 1.5 * noise / parameter.shape[1] ** 0.5
        parameter.data.copy_(value)


def make_model(folder, name):
    model = MODELS[name]
    path = folder / name
    shutil.rmtree(path, ignore_errors=True)
    config = make_config(model)
    if model.weights_of:
        config.architectures = [FAMILIES[model.family][1].__name__]
        config.dtype = model.dtype
        config.save_pretrained(path)
        (path / "model.safetensors").symlink_to(f"../{model.weights_of}/model.safetensors")
    else:
        network = FAMILIES[model.family][1](config)
        randomize(network, torch.Generator().manual_seed(0))
        network.to(model.dtype).save_pretrained(path, max_shard_size=model.max_shard_size)
    tokens = torch.randint(VOCAB, (max(LENGTHS),), generator=torch.Generator().manual_seed(1))
    golden_logits.record(path, tokens, LENGTHS, path / "golden.safetensors")
    print(path, sum(file.lstat().st_size for file in path.iterdir()), "bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    transformers.utils.logging.disable_progress_bar()
    folder = parser.parse_args().folder
    for name in MODELS:
        make_model(folder, name)


if __name__ == "__main__":
    main()
