#!/usr/bin/env python3
"""Writes the SmolLM2-135M-Instruct of a GGUF file as a Hugging Face folder in bfloat16. Called by fetch_smollm2.sh.

    smollm2_to_huggingface.py MODEL.gguf FOLDER

Quantized tensors are dequantized and rounded to bfloat16. Needs numpy and gguf.
"""

import json
import pathlib
import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

# Names of a layer's tensors: GGUF's to Hugging Face's.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # token type in GGUF
# GPT-2's byte-level BPE with single digits; GGUF calls this pre-tokenizer "smollm".
PRE_TOKENIZER = {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}


def read_fields(reader):
    """Returns the file's metadata by name. Exits with a message unless it is the model that this script converts."""
    fields = {name: field.contents() for name, field in reader.fields.items()}
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for name, value in expected.items():
        if fields.get(name) != value:
            sys.exit(f"the GGUF file has {name} {fields.get(name)!r}; this script converts {value!r} only")
    return fields


def huggingface_name(name):
    if name in ("token_embd.weight", "output_norm.weight"):
        return {"t": "model.embed_tokens.weight", "o": "model.norm.weight"}[name[0]]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"


def unpermute(weights, heads):
    """Returns a query or key projection with rows in Hugging Face's order. The two rows that RoPE rotates together are
    adjacent in GGUF, and half a head apart in Hugging Face's order."""
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values):
    """Returns the bits of float32 values rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def convert_tensors(reader, fields):
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weights = unpermute(weights, heads[kind])
        tensors[huggingface_name(tensor.name)] = to_bfloat16(weights)
    return tensors


def write_safetensors(tensors, path):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())


def special_ids(fields):
    return {f"{name}_token_id": fields[f"tokenizer.ggml.{long_name}_token_id"]
            for name, long_name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}


def make_config(fields, tensors):
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden, "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads, "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads, "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": float(fields["llama.rope.freq_base"]), "rope_scaling": None,
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors, **special_ids(fields)}


def make_tokenizer(fields):
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for i, token in enumerate(tokens) if types[i] == CONTROL_TOKEN]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZER, "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": fields["tokenizer.ggml.merges"]}}


def make_tokenizer_config(fields):
    tokens = fields["tokenizer.ggml.tokens"]
    named = {name.removesuffix("_id"): tokens[i] for name, i in special_ids(fields).items()}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"], "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            **named, "chat_template": fields["tokenizer.chat_template"]}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    reader, folder = GGUFReader(sys.argv[1]), pathlib.Path(sys.argv[2])
    fields = read_fields(reader)
    tensors = convert_tensors(reader, fields)
    write_safetensors(tensors, folder / "model.safetensors")
    for name, content in (("config", make_config(fields, tensors)), ("tokenizer", make_tokenizer(fields)),
                          ("tokenizer_config", make_tokenizer_config(fields)),
                          ("generation_config", {"_from_model_config": True, **special_ids(fields)})):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    print(f"{len(tensors)} tensors of the types {', '.join(kinds)}, written as bfloat16 into {folder}")


if __name__ == "__main__":
    main()
