#!/usr/bin/env python3
"""Records golden/masses.json: the attention mass that sparse decoding keeps, with positions as trained and grouped.

An independent definition in NumPy and float64 that shares no code with the kernels: the whole reference model, its
selectors, and for every (generated token, layer, query head)

    mass = sum over the attended tokens of exp(l_j) / sum over all tokens of exp(l_j)

where l_j is the logit of token j with query and key at the distance that attention uses. Under grouped positions
(SelfExtend) this distance depends on j's own side of the neighbourhood, selected or not. e2e/position_extension_test.py
compares the service with these masses.

    python3 tests/model/make_golden_masses.py        (needs numpy)
"""

import json
import math
import pathlib
import struct

import numpy as np

FOLDER = pathlib.Path(__file__).parent
MODEL = FOLDER / "needle-8k"
PAGE = 64
SINK, WINDOW, BUDGET = 64, 128, 256
GROUP_SIZE, NEAR = 8, 100  # for grouped positions
PROMPT = [3 + i * i * 31 % 1009 for i in range(1000)]
TOKEN, STEPS = 7, 8  # the generated token, whatever the logits are


def load_weights():
    weights = {}
    for path in MODEL.glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        for name, tensor in json.loads(data[8:begin]).items():
            if name == "__metadata__":
                continue
            assert tensor["dtype"] == "BF16"
            first, end = tensor["data_offsets"]
            bits = np.frombuffer(data[begin + first:begin + end], dtype=np.uint16).astype(np.uint32) << 16
            weights[name] = bits.view(np.float32).astype(np.float64).reshape(tensor["shape"])
    return weights


class Attention:
    """One layer's unrotated queries [tokens, heads, dim] and keys [tokens, KV heads, dim]."""

    def __init__(self, config, q, k, grouped):
        self.q, self.k, self.grouped = q, k, grouped
        self.dim, self.group = config["head_dim"], q.shape[1] // k.shape[1]
        half = self.dim // 2
        self.frequencies = config["rope_theta"] ** (-np.arange(half) / half)

    def rotated(self, x, positions):
        angles = np.multiply.outer(np.asarray(positions, dtype=np.float64), self.frequencies)
        c, s = np.cos(angles), np.sin(angles)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    def logits(self, head):
        """Returns the logits of attention, [tokens, tokens]; -inf for keys after the query."""
        q, k, positions = self.q[:, head], self.k[:, head // self.group], np.arange(len(self.q))

        def products(queries_at, keys_at):
            return self.rotated(q, queries_at) @ self.rotated(k, keys_at).T
        found = products(positions, positions)
        if self.grouped:
            far = products(positions // GROUP_SIZE + NEAR - NEAR // GROUP_SIZE, positions // GROUP_SIZE)
            found = np.where(positions[:, None] - positions < NEAR, found, far)
        return np.where(positions <= positions[:, None], found / math.sqrt(self.dim), -np.inf)

    def seen_by_selector(self, kv_head, position):
        """Returns queries of the group, and keys. Selectors see all unrotated keys at the distance of the window."""
        queries = self.q[position, kv_head * self.group:(kv_head + 1) * self.group]
        keys = self.k[:position + 1, kv_head]
        if self.grouped:
            return self.rotated(queries, np.full(self.group, WINDOW)), keys
        return self.rotated(queries, np.full(self.group, position)), self.rotated(keys, np.arange(position + 1))


def best(scores, count):
    """Returns the indices of the largest scores; the later ones among equals."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], -i))[:count]


def streaming(_queries, _keys, _begin, _end):
    return []


def quest(queries, keys, begin, end):
    scores, first = [], begin // PAGE
    for page in range(first, -(-end // PAGE)):
        some = keys[page * PAGE:(page + 1) * PAGE]
        small, large = np.sort([queries * some.min(axis=0), queries * some.max(axis=0)], axis=0)
        scores.append((large + small / 2).sum(axis=-1).max())
    pages = [first + i for i in best(scores, -(-BUDGET // PAGE))]
    return [t for page in pages for t in range(page * PAGE, (page + 1) * PAGE) if begin <= t < end]


def tokenselect(queries, keys, begin, end):
    logits = queries @ keys[begin:end].T / math.sqrt(keys.shape[1])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    votes = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    return [begin + i for i in best(votes, BUDGET)]


def attended(selector, attention, kv_head, position):
    begin, end = SINK, position - WINDOW + 1
    chosen = selector(*attention.seen_by_selector(kv_head, position), begin, end)
    return np.union1d(np.r_[:begin, end:position + 1], chosen).astype(int)


def masses(config, weights, selector, grouped):
    """Returns one mass for every (layer, head, generated token)."""
    tokens = PROMPT + [TOKEN] * STEPS
    heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    x, found = weights["model.embed_tokens.weight"][tokens], []

    def normed(x, name):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]
    for layer in range(config["num_hidden_layers"]):
        def linear(x, name):
            return x @ weights[f"model.layers.{layer}.{name}.weight"].T
        h = normed(x, f"model.layers.{layer}.input_layernorm.weight")
        q, k, v = (linear(h, f"self_attn.{name}_proj").reshape(len(tokens), -1, dim) for name in "qkv")
        attention, out = Attention(config, q, k, grouped), np.zeros_like(q)
        for head in range(heads):
            kv_head = head * kv_heads // heads
            logits = attention.logits(head)
            exp = np.exp(logits - logits.max(axis=1, keepdims=True))
            for position in range(len(PROMPT), len(tokens)):
                kept = np.zeros(len(tokens), dtype=bool)
                kept[attended(selector, attention, kv_head, position)] = True
                found.append(exp[position, kept].sum() / exp[position].sum())
                exp[position, ~kept] = 0
            out[:, head] = exp / exp.sum(axis=1, keepdims=True) @ v[:, kv_head]
        x = x + linear(out.reshape(len(tokens), -1), "self_attn.o_proj")
        h = normed(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate = linear(h, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    return found


def main():
    config, weights = json.loads((MODEL / "config.json").read_text()), load_weights()
    cases = []
    for grouped in (False, True):
        for selector in (streaming, quest, tokenselect):
            found = masses(config, weights, selector, grouped)
            cases.append(dict(selector=selector.__name__, grouped=grouped, samples=len(found),
                              mean=round(float(np.mean(found)), 6), minimum=round(float(np.min(found)), 6)))
    golden = dict(prompt=PROMPT, token=TOKEN, steps=STEPS, sink=SINK, window=WINDOW, budget=BUDGET,
                  group_size=GROUP_SIZE, near=NEAR, cases=cases)
    (FOLDER / "golden" / "masses.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
