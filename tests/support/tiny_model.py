"""A folder with a random Llama that the service loads in no time: for tests that need a model but no meaning.

    make_tiny_model(folder)             # float32, the vocabulary of needle-8k
    make_tiny_model(folder, seed=2)     # another model of the same shape
    make_tiny_model(folder, kv_heads=4) # every query head has a KV head of its own
    make_tiny_model(folder, layers=16, head_dim=128)  # as much KV a token as a large model has

A token block is 32 KiB of KV on one rank, with 2 KV heads, 2 layers and a head_dim of 16.
"""

import json
import pathlib
import random
import shutil
import struct

REFERENCE = pathlib.Path(__file__).resolve().parents[1] / "model" / "needle-8k"
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 128, 4, 2, 16, 1472


def shapes(kv_heads=KV_HEADS, layers=LAYERS, head_dim=HEAD_DIM):
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (HIDDEN,)
        for name, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}self_attn.{name}_proj.weight", (heads * head_dim, HIDDEN)
        yield prefix + "self_attn.o_proj.weight", (HIDDEN, HEADS * head_dim)
        yield prefix + "post_attention_layernorm.weight", (HIDDEN,)
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", (INTERMEDIATE, HIDDEN)
        yield prefix + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def values(shape, rng):
    if len(shape) == 1:
        return [1.0] * shape[0]
    # Large enough that the greedy choice depends on what was read long ago.
    scale = 1.0 if shape[0] == VOCAB else 2.0 / shape[1] ** 0.5
    return [rng.uniform(-scale, scale) * 1.7 for _ in range(shape[0] * shape[1])]


def make_tiny_model(folder, seed=1, kv_heads=KV_HEADS, layers=LAYERS, head_dim=HEAD_DIM):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    header, data = {}, bytearray()
    for name, shape in shapes(kv_heads, layers, head_dim):
        numbers = values(shape, rng)
        begin = len(data)
        data += struct.pack(f"<{len(numbers)}f", *numbers)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = json.loads((REFERENCE / "config.json").read_text())
    config.update(torch_dtype="float32", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
                  num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=kv_heads,
                  head_dim=head_dim)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(REFERENCE / name, folder / name)
    return folder
