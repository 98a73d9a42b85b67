"""Records logits that transformers computes, for tests of our forward pass. Imported by make_random_models.py and
make_golden_logits.py.

A golden file is a safetensors file:

    tokens       int32 [longest length]     a run of length N uses the first N
    positions/N  int32 [positions]          ascending; the last is N - 1
    logits/N     float32 [positions, vocab]

Computed in float32 from the saved weights. Every length is a separate run: the frequencies of dynamic RoPE depend on it.
"""

import torch
import transformers
from safetensors.torch import save_file


def positions_of(length):
    """Returns the last position and 16 others spread over the sequence."""
    return sorted({length - 1} | {index * length // 16 for index in range(16)})


@torch.no_grad()
def record(folder, tokens, lengths, path):
    """Writes the golden file of the model in `folder` for prefixes of `tokens`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                              attn_implementation="sdpa").eval()
    tensors = {"tokens": tokens[:max(lengths)].to(torch.int32)}
    for length in lengths:
        positions = torch.tensor(positions_of(length))
        hidden = model.model(tokens[None, :length], use_cache=False).last_hidden_state[0, positions]
        tensors[f"positions/{length}"] = positions.to(torch.int32)
        tensors[f"logits/{length}"] = model.lm_head(hidden).float().contiguous()
    save_file(tensors, path)
