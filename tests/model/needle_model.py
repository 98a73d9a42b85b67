"""The reference model: a small Llama in plain PyTorch, with attention passed in, and its files in Hugging Face layout.

Parameters have the names of transformers' LlamaForCausalLM, so a state_dict can be saved as model.safetensors unchanged.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# attend(layer, q, k, v) -> output. q and the output [batch, query heads, tokens, head_dim], k and v [batch, KV heads,
# tokens, head_dim]. q and k are unrotated: attend chooses the positions.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    window: int = 8192  # longest sequence of the training, in tokens
    hidden_size: int = 256
    mlp_size: int = 768
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    rope_theta: float = 5e5
    norm_epsilon: float = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.epsilon = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(layer, q, k, v).transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(tokens).to(torch.bfloat16)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend)
        return self.norm(x)


class Needle(nn.Module):
    """tokens [batch, tokens] -> logits [batch, tokens, vocabulary]; activations are bf16."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialize()

    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * self.config.num_layers) ** 0.5 if into_residual else 1))

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        return self.lm_head(self.model(tokens, attend))


class Rope:
    """Rotary embedding of head vectors. Pairs are (i, i + head_dim / 2), as in transformers."""

    def __init__(self, config: ModelConfig, device: torch.device):
        exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
        self.frequencies = config.rope_theta ** -exponents

    def tables(self, positions: Tensor) -> "tuple[Tensor, Tensor]":
        """Returns cosines and sines [..., head_dim] of positions [...]."""
        angles = positions.float()[..., None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: "tuple[Tensor, Tensor]") -> Tensor:
    """Returns x [..., head_dim] rotated by tables that broadcast to it, in the dtype of x."""
    cosines, sines = tables
    low, high = x.chunk(2, -1)
    return (x * cosines + torch.cat((-high, low), -1) * sines).to(x.dtype)


def save_model(model: Needle, folder: Path, begin_id: int, end_id: int, pad_id: int) -> None:
    """Writes config.json, generation_config.json and model.safetensors (bf16)."""
    config = model.config
    ids = {"bos_token_id": begin_id, "eos_token_id": end_id, "pad_token_id": pad_id}
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.window, "rope_theta": config.rope_theta, "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, **ids})
    _write_json(folder / "generation_config.json", {"do_sample": False, **ids})
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load_model(folder: Path) -> Needle:
    """Returns the model of a folder, with parameters in float32."""
    stored = json.loads((folder / "config.json").read_text())
    model = Needle(ModelConfig(
        vocab_size=stored["vocab_size"], window=stored["max_position_embeddings"], hidden_size=stored["hidden_size"],
        mlp_size=stored["intermediate_size"], num_layers=stored["num_hidden_layers"],
        num_heads=stored["num_attention_heads"], num_kv_heads=stored["num_key_value_heads"],
        head_dim=stored["head_dim"], rope_theta=stored["rope_theta"], norm_epsilon=stored["rms_norm_eps"]))
    model.load_state_dict(load_file(str(folder / "model.safetensors")))
    return model


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
