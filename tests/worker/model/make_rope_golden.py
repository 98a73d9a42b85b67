#!/usr/bin/env python3
"""Records the rotary frequencies that transformers computes for a list of configurations.

    make_rope_golden.py        writes testdata/rope_golden.json beside this script

Each case holds the fields of config.json that differ from BASE, the context length, and what transformers made of
them (in float32). Read by rope_frequencies_test.cc. Needs torch and transformers.
"""

import json
from pathlib import Path

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}

# name: (fields, context length)
CASES = {
    "plain_default_theta": ({}, 8192),
    "plain_head_128_theta_500k": ({"head_dim": 128, "rope_theta": 500000.0}, 8192),
    "plain_head_16_theta_inside": ({"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 8192),
    "linear_old_spelling": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
    "linear": ({"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 50000.0}}, 8192),
    "dynamic_within_trained": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 5000),
    "dynamic_beyond": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 30000),
    "dynamic_head_128": ({"head_dim": 128, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 131072),
    "yarn_qwen": ({"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),
    "yarn_no_original": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 8192),
    "yarn_factor_null": ({"max_position_embeddings": 65536, "rope_scaling": dict(YARN, factor=None)}, 8192),
    "yarn_original_outside": ({"max_position_embeddings": 65536, "original_max_position_embeddings": 4096,
                               "rope_scaling": {"rope_type": "yarn", "factor": 16.0}}, 8192),
    "yarn_attention_factor": ({"rope_scaling": dict(YARN, attention_factor=1.5)}, 8192),
    "yarn_mscale": ({"rope_scaling": dict(YARN, factor=40.0, mscale=0.707, mscale_all_dim=1.2)}, 8192),
    "yarn_mscale_zero": ({"rope_scaling": dict(YARN, mscale=0.0, mscale_all_dim=1.2)}, 8192),
    "yarn_mscale_alone": ({"rope_scaling": dict(YARN, mscale=0.707)}, 8192),
    "yarn_betas": ({"rope_scaling": dict(YARN, beta_fast=16, beta_slow=2)}, 8192),
    "yarn_no_truncate": ({"rope_scaling": dict(YARN, truncate=False)}, 8192),
    "yarn_factor_1": ({"rope_scaling": dict(YARN, factor=1.0)}, 8192),
    "yarn_tiny_original": ({"rope_scaling": dict(YARN, original_max_position_embeddings=4)}, 8192),
    "yarn_huge_original": ({"head_dim": 16, "rope_theta": 10.0,
                            "rope_scaling": dict(YARN, original_max_position_embeddings=2**30)}, 8192),
    "llama31": ({"head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": LLAMA31}, 8192),
    "llama32": ({"head_dim": 64, "rope_parameters": dict(LLAMA31, factor=32.0, rope_theta=500000.0)}, 8192),
    "llama3_no_original": ({"rope_scaling": {key: value for key, value in LLAMA31.items() if key[0] != "o"}}, 8192),
}


def frequencies(fields, context_length):
    config = transformers.LlamaConfig.from_dict(json.loads(json.dumps({**BASE, **fields})))
    rotary = LlamaRotaryEmbedding(config)
    inv_freq, factor = rotary.inv_freq, rotary.attention_scaling
    if rotary.rope_type == "dynamic":
        inv_freq, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=context_length)
    return [float(f"{value:.9g}") for value in inv_freq.tolist()], factor


def main():
    cases = {}
    for name, (fields, context_length) in CASES.items():
        inv_freq, factor = frequencies(fields, context_length)
        cases[name] = {"fields": fields, "context_length": context_length, "attention_factor": factor,
                       "inv_freq": inv_freq}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    path = Path(__file__).parent / "testdata" / "rope_golden.json"
    path.write_text(f'{{"base": {json.dumps(BASE)},\n"cases": {{\n{lines}}}}}\n')
    print(f"{path.name}: {len(cases)} cases by transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
