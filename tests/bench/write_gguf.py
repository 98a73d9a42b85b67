#!/usr/bin/env python3
"""Writes a Hugging Face folder of the Llama family as a GGUF file, so that llama.cpp runs with the same weights.

    write_gguf.py FOLDER TYPE FILE.gguf        TYPE: F16, BF16 or Q8_0, of all matrices; norms are float32

Called by peer_llama_cpp.py, in an environment with numpy and gguf. The file has a tokenizer only so that it loads: the
benchmark sends token ids.
"""

import json
import pathlib
import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def read_safetensors(path):
    """Yields (name, float32 values) of every tensor of the file."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + header_bytes)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        values = data[begin:end]
        if entry["dtype"] == "BF16":
            values = (values.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = values.view({"F16": "<f2", "F32": "<f4"}[entry["dtype"]]).astype(np.float32)
        yield name, values.reshape(entry["shape"])


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, kind = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[kind]}.weight"
    return f"{NAMES[stem]}.weight"


def permute(weights, heads):
    """Returns a query or key projection with rows in GGUF's order. The two rows that RoPE rotates together are adjacent
    in it, and half a head apart in Hugging Face's order."""
    rows, columns = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def check(config):
    unsupported = [f"{key} {config[key]!r}" for key, value in
                   (("model_type", "llama"), ("rope_scaling", None), ("attention_bias", False), ("mlp_bias", False))
                   if config.get(key, value) != value]
    if unsupported:
        sys.exit(f"this writer knows plain Llama models only; the model has {', '.join(unsupported)}")


def add_config(writer, config, file_type):
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name("benchmark")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(LlamaFileType[f"MOSTLY_{file_type}"])


def add_tokenizer(writer, tokenizer, config):
    tokens = [f"[unused {i}]" for i in range(config["vocab_size"])]
    types = [TokenType.UNUSED] * len(tokens)
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = token, TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], TokenType.CONTROL
    merges = tokenizer["model"]["merges"]
    eos = config["eos_token_id"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    writer.add_add_bos_token(False)


def add_tensors(writer, folder, config, file_type):
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for path in sorted(folder.glob("*.safetensors")):
        for name, values in read_safetensors(path):
            name = gguf_name(name)
            if config.get("tie_word_embeddings") and name == "output.weight":
                continue
            kind = name.split(".")[-2]
            if kind in heads:
                values = permute(values, heads[kind])
            if values.ndim == 1:
                writer.add_tensor(name, values)
            else:
                stored = GGMLQuantizationType[file_type]
                writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)


def write(folder, file_type, path):
    config = json.loads((folder / "config.json").read_text())
    check(config)
    writer = GGUFWriter(path, "llama")
    add_config(writer, config, file_type)
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    add_tensors(writer, folder, config, file_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    write(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3])
