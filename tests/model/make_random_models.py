#!/usr/bin/env python3
"""Makes small models with random weights of each family and kind of rotary embedding, in Hugging Face layout, and
records the logits that transformers computes with them.

    make_random_models.py FOLDER --all                       every family x rope x tied, in folders of their own
    make_random_models.py FOLDER --family qwen3 --rope yarn  one model in FOLDER

Beside the model lies golden.json: {"tokens": [...], "positions": [...], "logits": [a row per position]}; computed in
float32 from the saved weights by `attn_implementation="eager"`. Weights are scaled so that attention is far from
uniform, norms and biases far from one and zero: a wrong head, offset or angle changes the logits. Deterministic by
--seed. Needs torch and transformers; tests use the recorded files only.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
import transformers

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
# The context that a model was trained for is short, so that the golden sequence passes it.
TRAINED_CONTEXT, EXTENDED_CONTEXT = 64, 512
ROPE_KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": TRAINED_CONTEXT},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": TRAINED_CONTEXT},
}


def make_config(arguments, family, rope, tied):
    config_class, _ = FAMILIES[family]
    return config_class(
        hidden_size=arguments.hidden, intermediate_size=arguments.intermediate, num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads, num_key_value_heads=arguments.kv_heads, head_dim=arguments.head_dim,
        vocab_size=arguments.vocab, rms_norm_eps=1e-5, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=[1],
        max_position_embeddings=TRAINED_CONTEXT if rope == "dynamic" else EXTENDED_CONTEXT,
        rope_parameters={"rope_type": rope, "rope_theta": 10000.0, **ROPE_KINDS[rope]},
        **({"attention_bias": True} if arguments.attention_bias and family != "qwen2" else {}))


def randomize(model, generator):
    """Gives every parameter values that matter to the result."""
    for name, parameter in model.named_parameters():
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


def positions_of(num_tokens):
    """The last position and 16 spread over the sequence."""
    return sorted({num_tokens - 1} | {index * num_tokens // 16 for index in range(16)})


@torch.no_grad()
def make_golden(folder, num_tokens, vocab, generator):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                              attn_implementation="eager").eval()
    tokens = torch.randint(vocab, (1, num_tokens), generator=generator)
    logits = model(tokens, use_cache=False).logits[0].double()
    positions = positions_of(num_tokens)
    rows = ",\n".join("[" + ",".join(f"{value:.7g}" for value in logits[p].tolist()) + "]" for p in positions)
    (Path(folder) / "golden.json").write_text(
        f'{{"tokens": {json.dumps(tokens[0].tolist())},\n"positions": {json.dumps(positions)},\n"logits": [\n{rows}]}}\n')


def make_model(arguments, folder, family, rope, tied):
    generator = torch.Generator().manual_seed(arguments.seed)
    model = FAMILIES[family][1](make_config(arguments, family, rope, tied))
    randomize(model, generator)
    model = model.to(getattr(torch, arguments.dtype))
    model.save_pretrained(folder, max_shard_size=arguments.max_shard_size)
    make_golden(folder, arguments.tokens, arguments.vocab, generator)
    size = sum(file.stat().st_size for file in Path(folder).iterdir())
    print(f"{folder}: {family}, {rope}, {'tied' if tied else 'untied'}, {size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every family, rope and tied or not")
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--rope", choices=ROPE_KINDS, default="default")
    parser.add_argument("--tied", action="store_true", help="the output head is the embedding")
    parser.add_argument("--attention-bias", action="store_true", help="biases on q, k, v and o (llama and qwen3)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="length of the golden sequence")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--max-shard-size", default="5GB", help="as in save_pretrained, e.g. 100KB")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if not arguments.all:
        make_model(arguments, arguments.folder, arguments.family, arguments.rope, arguments.tied)
        return
    for family, rope, tied in itertools.product(FAMILIES, ROPE_KINDS, (False, True)):
        make_model(arguments, arguments.folder / f"{family}-{rope}-{'tied' if tied else 'untied'}", family, rope, tied)


if __name__ == "__main__":
    main()
