#!/usr/bin/env python3
"""Writes the seed corpora of the fuzzers: small files that a reader must accept (ok_*) or refuse (bad_*).

    make_corpus.py [FOLDER]        default: corpus beside this script

corpus/chat_template holds the templates of tests/coordinator/chat with a conversation each, and the snippets.
corpus/safetensors is also replayed by tests/worker/model/safetensors_test.cc, which holds the message expected
for each file, and corpus/model_config by model_config_test.cc. Needs nothing but Python.
"""

import json
import struct
import sys
from pathlib import Path

CHAT = Path(__file__).resolve().parents[1] / "coordinator" / "chat"
sys.path.insert(0, str(CHAT))
from conversations import CONVERSATIONS  # noqa: E402
from snippets import SNIPPETS  # noqa: E402


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header, data_size=0, length=None):
    """The bytes of a file; `header` is a dict, text or bytes, `length` what the file claims the header's length is."""
    if isinstance(header, dict):
        header = json.dumps(header, separators=(",", ":"))
    if isinstance(header, str):
        header = header.encode()
    length = len(header) if length is None else length
    return struct.pack("<Q", length) + header + bytes(range(256)) * (data_size // 256) + bytes(range(data_size % 256))


def one(dtype='"F32"', shape="[2]", offsets="[0,8]", data_size=8, extra=""):
    """One tensor named a, its fields as JSON text."""
    return file_of('{"a":{"dtype":%s,"shape":%s,"data_offsets":%s%s}}' % (dtype, shape, offsets, extra), data_size)


A = tensor("F32", [2], 0, 8)
DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8,
          "I64": 8, "F64": 8, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}


def all_dtypes():
    header, end = {}, 0
    for name, size in DTYPES.items():
        header[name] = tensor(name, [2], end, end + 2 * size)
        end += 2 * size
    header["F4"] = tensor("F4", [4], end, end + 2)
    header["F6_E2M3"] = tensor("F6_E2M3", [4], end + 2, end + 5)
    header["F6_E3M2"] = tensor("F6_E3M2", [4], end + 5, end + 8)
    return file_of(header, end + 8)


SAFETENSORS = {
    "ok_no_tensors": file_of({}),
    "ok_one": file_of({"a": A}, 8),
    "ok_scalar": file_of({"a": tensor("BF16", [], 0, 2)}, 2),
    "ok_zero_size": file_of({"a": A, "b": tensor("F32", [0, 4611686018427387904], 8, 8)}, 8),
    "ok_metadata": file_of({"__metadata__": {"format": "pt", "note": "\u00e9"}, "a": A}, 8),
    "ok_padding": file_of(json.dumps({"a": A}) + "     ", 8),
    "ok_rank_8": file_of({"a": tensor("F16", [1, 1, 1, 1, 1, 1, 2, 2], 0, 8)}, 8),
    "ok_not_in_order": file_of({"b": tensor("F32", [2], 8, 16), "a": A}, 16),
    "ok_all_dtypes": all_dtypes(),
    # The length and the frame.
    "bad_empty": b"",
    "bad_three_bytes": b"\x01\x02\x03",
    "bad_length_beyond_file": file_of({"a": A}, 0, length=100),
    "bad_length_above_limit": file_of({"a": A}, 8, length=16 * 2**20 + 1),
    "bad_length_100_mb": file_of({"a": A}, 8, length=100 * 2**20),
    "bad_length_2_63": file_of({"a": A}, 8, length=2**63),
    "bad_length_2_64": file_of({"a": A}, 8, length=2**64 - 1),
    "bad_length_zero": file_of("", 8),
    "bad_length_too_short": file_of({"a": A}, 8, length=20),
    # JSON.
    "bad_not_json": file_of("{hello}", 8),
    "bad_cut": file_of('{"a":{"dtype":"F32","shape":[2],', 8),
    "bad_second_value": file_of(json.dumps({"a": A}) + "{}", 8),
    "bad_nul_then_more": file_of(json.dumps({"a": A}) + "\0{}", 8),
    "bad_comment": file_of('{/* a */"a":' + json.dumps(A) + "}", 8),
    "bad_byte_order_mark": file_of(b"\xef\xbb\xbf" + json.dumps({"a": A}).encode(), 8),
    "bad_leading_space": file_of(" " + json.dumps({"a": A}), 8),
    "bad_array": file_of("[]", 0),
    "bad_deep_nesting": file_of('{"a":' + "[" * 5000 + "]" * 5000 + "}", 0),
    "bad_deep_objects": file_of('{"a":' * 2000 + "{}" + "}" * 2000, 0),
    "bad_deep_metadata": file_of('{"__metadata__":{"a":' + "[" * 5000 + "]" * 5000 + "}}", 0),
    "bad_utf8_in_name": file_of(b'{"\xff\xfe":' + json.dumps(A).encode() + b"}", 8),
    "bad_utf8_overlong": file_of(b'{"\xc0\xaf":' + json.dumps(A).encode() + b"}", 8),
    "bad_utf8_in_metadata": file_of(b'{"__metadata__":{"a":"\x80"},"a":' + json.dumps(A).encode() + b"}", 8),
    "bad_lone_surrogate": file_of('{"\\ud800":' + json.dumps(A) + "}", 8),
    "bad_number_overflow": one(shape="[1e999]"),
    # Names.
    "bad_duplicate_name": file_of('{"a":%s,"a":%s}' % (json.dumps(A), json.dumps(tensor("F32", [2], 8, 16))), 16),
    "bad_duplicate_name_escaped": file_of('{"a":%s,"\\u0061":%s}' % (json.dumps(A), json.dumps(A)), 8),
    "bad_duplicate_metadata": file_of('{"__metadata__":{},"__metadata__":{},"a":%s}' % json.dumps(A), 8),
    "bad_duplicate_metadata_key": file_of('{"__metadata__":{"k":"1","k":"2"},"a":%s}' % json.dumps(A), 8),
    "bad_duplicate_field": one(extra=',"dtype":"F32"'),
    "bad_metadata_text": file_of({"__metadata__": "pt", "a": A}, 8),
    "bad_metadata_number": file_of({"__metadata__": {"k": 1}, "a": A}, 8),
    "bad_metadata_object": file_of({"__metadata__": {"k": {"x": "y"}}, "a": A}, 8),
    "bad_metadata_null": file_of({"__metadata__": {"k": None}, "a": A}, 8),
    # One tensor.
    "bad_tensor_null": file_of({"a": None}, 0),
    "bad_tensor_list": file_of({"a": [1]}, 0),
    "bad_tensor_empty": file_of({"a": {}}, 0),
    "bad_unknown_field": one(extra=',"strides":[1]'),
    "bad_missing_dtype": file_of('{"a":{"shape":[2],"data_offsets":[0,8]}}', 8),
    "bad_missing_shape": file_of('{"a":{"dtype":"F32","data_offsets":[0,4]}}', 4),
    "bad_missing_offsets": file_of('{"a":{"dtype":"F32","shape":[2]}}', 8),
    "bad_dtype_unknown": one(dtype='"F31"'),
    "bad_dtype_lower_case": one(dtype='"f32"'),
    "bad_dtype_number": one(dtype="32"),
    "bad_rank_9": one(shape="[1,1,1,1,1,1,1,1,2]"),
    "bad_rank_huge": one(shape="[" + ",".join("1" * 3000) + "]"),
    "bad_shape_negative": one(shape="[-2]"),
    "bad_shape_fraction": one(shape="[2.0]"),
    "bad_shape_exponent": one(shape="[2e0]"),
    "bad_shape_text": one(shape='["2"]'),
    "bad_shape_nested": one(shape="[[2]]"),
    "bad_shape_bool": one(shape="[true]"),
    "bad_shape_number": one(shape="2"),
    "bad_shape_2_63": one(shape="[9223372036854775808]"),
    "bad_shape_2_64": one(shape="[18446744073709551616]"),
    "bad_shape_wraps_to_zero": one(shape="[4294967296,4294967296]", offsets="[0,0]", data_size=0),
    "bad_shape_wraps_to_size": one(shape="[4611686018427387906]"),
    "bad_shape_wraps_before_zero": one(shape="[4611686018427387904,0]", offsets="[0,0]", data_size=0),
    "bad_offsets_reversed": one(offsets="[8,0]"),
    "bad_offsets_beyond_data": one(offsets="[0,16]", shape="[4]"),
    "bad_offsets_far_beyond": one(offsets="[9223372036854775799,9223372036854775807]"),
    "bad_offsets_2_64": one(offsets="[0,18446744073709551615]"),
    "bad_offsets_negative": one(offsets="[-8,0]"),
    "bad_offsets_one": one(offsets="[8]"),
    "bad_offsets_three": one(offsets="[0,4,8]"),
    "bad_size_too_small": one(shape="[3]"),
    "bad_size_too_large": one(shape="[1]"),
    "bad_bits_not_whole_bytes": one(dtype='"F4"', shape="[3]", offsets="[0,1]", data_size=1),
    # How tensors lie together.
    "bad_overlap": file_of({"a": A, "b": tensor("F32", [2], 4, 12)}, 12),
    "bad_inside": file_of({"a": tensor("F32", [4], 0, 16), "b": tensor("F32", [1], 4, 8)}, 16),
    "bad_same_range": file_of({"a": A, "b": A}, 8),
    "bad_zero_size_inside": file_of({"a": A, "b": tensor("F32", [0], 4, 4)}, 8),
    "bad_hole": file_of({"a": A, "b": tensor("F32", [1], 12, 16)}, 16),
    "bad_hole_at_begin": file_of({"a": tensor("F32", [2], 4, 12)}, 12),
    "bad_trailing_bytes": file_of({"a": A}, 9),
    "bad_data_without_tensors": file_of({}, 8),
}

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": [1, 2],
}


def config(generation=None, **fields):
    """config.json, then, behind a NUL byte, generation_config.json."""
    text = json.dumps({key: value for key, value in {**LLAMA, **fields}.items() if value != "absent"}).encode()
    return text if generation is None else text + b"\0" + json.dumps(generation).encode()


QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=4096, use_sliding_window=False,
             max_window_layers=2)
QWEN3 = dict(QWEN2, architectures=["Qwen3ForCausalLM"], model_type="qwen3", layer_types=["full_attention"] * 2)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 2048}

MODEL_CONFIG = {
    "ok_llama": config(),
    "ok_generation_config": config({"eos_token_id": 3, "temperature": 0.6}),
    "ok_generation_config_list": config({"eos_token_id": [3, 4]}),
    "ok_qwen2": config(**QWEN2),
    "ok_qwen3": config(**QWEN3, attention_bias=True),
    "ok_mistral": config(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None),
    "ok_mistral_window": config(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=1024),
    "ok_sliding_window": config(**dict(QWEN2, use_sliding_window=True, sliding_window=64, max_window_layers=1)),
    "ok_layer_types": config(**dict(QWEN3, use_sliding_window=True, sliding_window=64,
                                    layer_types=["sliding_attention", "full_attention"])),
    "ok_tied": config(tie_word_embeddings=True),
    "ok_old_llama": config(num_key_value_heads="absent", head_dim="absent"),
    "ok_linear": config(rope_scaling={"type": "linear", "factor": 2}),
    "ok_dynamic": config(rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    "ok_yarn": config(rope_scaling=YARN),
    "ok_yarn_all": config(rope_parameters=dict(YARN, rope_theta=10000.0, mscale=0.7, mscale_all_dim=1.0, beta_fast=16,
                                               beta_slow=2, truncate=False, attention_factor=1.2)),
    "ok_llama3": config(rope_parameters=dict(LLAMA3, rope_theta=500000.0)),
    "bad_cut": config()[:100],
    "bad_duplicate_key": config()[:-1] + b',"vocab_size":512}',
    "bad_deep": b"[" * 5000,
    "bad_layers_2_31": config(num_hidden_layers=2**31),
    "bad_head_dim_zero": config(head_dim=0),
    "bad_kv_heads": config(num_key_value_heads=3),
    "bad_rope_nan": config(rope_theta=float("nan")),
    "bad_rope_longrope": config(rope_scaling={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
    "bad_layer_types": config(**dict(QWEN3, use_sliding_window=True, layer_types=["sliding_attention"])),
    "bad_sliding_window": config(**dict(QWEN2, use_sliding_window=True, sliding_window=0)),
    "bad_experts": config(num_experts=8),
    "bad_generation_config": config({"eos_token_id": 256}),
}


def chat_templates():
    """A template, a 0 byte and the messages; the snippets by tens, with no messages of their own."""
    files = {}
    for i, path in enumerate(sorted((CHAT / "templates").glob("*.jinja"))):
        messages = json.dumps(CONVERSATIONS[-i - 3][1], ensure_ascii=False)
        files[path.stem] = path.read_bytes() + b"\0" + messages.encode()
    for i in range(0, len(SNIPPETS), 10):
        files[f"snippets_{i}"] = "\n".join(s for s in SNIPPETS[i:i + 10] if "1 / 0" not in s).encode()
    files["escape_cuts_a_character"] = "{{ '\\u0\u041a\u01a1' }}".encode()
    return files


def http_bodies():
    parts = [{"type": "text", "text": "a\u00e9"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    bodies = {
        "chat": {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
                 "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "stream": True,
                 "stream_options": {"include_usage": True, "continuous_usage_stats": False}},
        "parts": {"messages": [{"role": "user", "content": parts[:1]}], "continue_final_message": True},
        "image": {"messages": [{"role": "user", "content": parts}]},
        "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"z": [1, {}], "a": None}}}],
                  "tool_choice": "auto", "messages": [{"role": "user", "content": "\"}{][,:"}]},
        "kwargs": {"messages": [{}], "chat_template_kwargs": {"enable_thinking": False}, "response_format": {"type": "text"}},
        "completion": {"prompt": "Once", "max_tokens": 5, "logprobs": 3, "echo": True, "n": 2, "best_of": 2, "seed": -1,
                       "stop": ["a", "b"], "logit_bias": {"5": -1.5}, "stop_token_ids": [1], "cache_salt": "s"},
        "prompts": {"prompt": [[1, 2], [3]], "sparsity": {"name": "x", "decode_overrides": {"token_budget": 64}}},
        "texts": {"prompt": ["a", "b"], "quality": 0.9, "temperature": 1e300, "top_k": -1},
        "numbers": {"prompt": [0, 2**31 - 1, 2**31, 1.0, 1e20], "n": 129, "min_tokens": -1},
    }
    files = {name: json.dumps(body).encode() for name, body in bodies.items()}
    files["escaped_key"] = b'{"m\\u0065ssages" : [ {"role":"user","content":"\\ud83e\\udd8a\\\\"} ] }'
    files["twice"] = b'{"prompt":1,"prompt":2}'
    files["surrogate"] = b'{"prompt":"\\ud83e"}'
    files["bytes"] = b'{"prompt":"\xff"}'
    files["deep"] = b"[" * 5000
    return files


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "corpus"
    for kind, files in (("safetensors", SAFETENSORS), ("model_config", MODEL_CONFIG),
                        ("chat_template", chat_templates()), ("http_body", http_bodies())):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / kind / name).write_bytes(content)
        print(f"{folder / kind}: {len(files)} files")


if __name__ == "__main__":
    main()
