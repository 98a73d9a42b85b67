#!/usr/bin/env python3
"""Logits of the service beside Hugging Face transformers, for each shape of model that is served.

For each shape a small model with random weights is made. transformers reads a prompt and the service's own answer in
float32, which is the truth, and in bfloat16. The service reads the prompt in bfloat16, in several chunks, and decodes the
answer. The table says how far both are from the truth: mean and largest difference of the log probabilities of the given
tokens, and at how many places the most probable token is that of float32. transformers' head is computed in float32, so
its difference is that of the layers alone. Exit status 1 if the service is farther away than transformers by more than
rounding explains.

    tests/quality/models_beside_transformers.py                                    on a CPU, small
    KVASIR_BUILD=FOLDER tests/quality/models_beside_transformers.py --device=cuda  on a GPU
    tests/quality/models_beside_transformers.py --models=llama-3.1 --wrong="rope_parameters.factor=7.0"

--wrong changes the config.json that the service reads: every comparison must then fail.

Weights are random and large enough to matter: attention's logits have a standard deviation of about 2, so that a query
looks at some tens of several thousand tokens, norms and biases are far from one and zero, and so are the model's logits.
Needs torch and transformers beside the packages of the tests.
"""

import argparse
import json
import pathlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "bench")]
from support.service import Service  # noqa: E402

import grpc  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from padded_tokenizer import write_padded_tokenizer  # noqa: E402

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Largest allowed ratio of our mean difference to transformers' in bfloat16, and of the largest differences.
MEAN_RATIO, MAX_RATIO = 1.5, 2.5


@dataclass
class Shape:
    """A model, by the names of config.json. Context and hidden size are small, heads are the original's or, in the largest
    models, as many of them as share two KV heads."""
    family: str
    heads: tuple  # query heads, KV heads
    head_dim: int = 128
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    extends: float = 1.0  # the context over the one that rotary embeddings were made for
    more: dict = field(default_factory=dict)


SHAPES = {
    "qwen2.5-7b": Shape("Qwen2", (28, 4), extends=4.0, rope={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}),
    "qwen2.5-0.5b": Shape("Qwen2", (14, 2), 64, rope={"rope_type": "default", "rope_theta": 1e6},
                          more={"tie_word_embeddings": True}),
    "qwen3-8b": Shape("Qwen3", (32, 8), rope={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3-yarn": Shape("Qwen3", (16, 8), extends=4.0, rope={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}),
    "llama-3.1-8b": Shape("Llama", (32, 8), extends=8.0, rope={**LLAMA3, "factor": 8.0}),
    "llama-3.2-1b": Shape("Llama", (32, 8), 64, extends=32.0, rope={**LLAMA3, "factor": 32.0},
                          more={"tie_word_embeddings": True}),
    "llama-2-7b": Shape("Llama", (32, 32)),
    "llama-3.1-405b": Shape("Llama", (32, 2), extends=8.0, rope={**LLAMA3, "factor": 8.0}),
    "mistral-large": Shape("Mistral", (24, 2), rope={"rope_type": "default", "rope_theta": 1e6}, more={"sliding_window": None}),
    "mistral-7b": Shape("Mistral", (32, 8), rope={"rope_type": "default", "rope_theta": 1e6}, more={"sliding_window": None}),
}


def make_config(shape, arguments):
    context = 2 * arguments.tokens + 1024
    rope = dict(shape.rope)
    if shape.extends > 1:
        rope["original_max_position_embeddings"] = int(context / shape.extends)
    return getattr(transformers, shape.family + "Config")(
        hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden, num_hidden_layers=arguments.layers,
        num_attention_heads=shape.heads[0], num_key_value_heads=shape.heads[1], head_dim=shape.head_dim,
        vocab_size=arguments.vocabulary, rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=1,
        max_position_embeddings=context, rope_parameters=rope, **shape.more)


def randomize(network):
    """Gives every parameter values that change the result."""
    generator = torch.Generator(network.device).manual_seed(0)
    tied = network.config.tie_word_embeddings
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value = 1.5 * (1.0 + 0.2 * noise)
        elif name.endswith("norm.weight"):
            value = 1.0 + 0.2 * noise
        elif name.endswith(".bias"):
            value = 0.3 * noise
        elif name.endswith("embed_tokens.weight"):
            # As a head, tied embeddings must not make logits that are certain of the token just read.
            value = noise * (1.5 / parameter.shape[1] ** 0.5 if tied else 1.0)
        else:
            value = 1.5 * noise / parameter.shape[1] ** 0.5
        parameter.data.copy_(value)


def make_model(shape, folder, arguments):
    """Writes the model to `folder`, in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(arguments.device):
        network = getattr(transformers, shape.family + "ForCausalLM")(make_config(shape, arguments))
    torch.set_default_dtype(torch.float32)
    randomize(network)
    network.save_pretrained(folder)
    write_padded_tokenizer(folder, arguments.vocabulary)


def load_model(folder, dtype, attention, arguments):
    """Loads it in another type. Network.to() would also round the frequencies of rotary embeddings."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention).to(arguments.device).eval()


def change_config(folder, change):
    """Applies "key.key=JSON" to config.json."""
    path = pathlib.Path(folder) / "config.json"
    config = json.loads(path.read_text())
    keys, value = change.split("=", 1)
    *outer, last = keys.split(".")
    place = config
    for key in outer:
        place = place[key]
    if last not in place:
        sys.exit(f"config.json has no {keys}; it has {config}")
    place[last] = json.loads(value)
    path.write_text(json.dumps(config))


@dataclass
class Given:
    """Log probabilities of the tokens of a text except the first, and the most probable token at each place."""
    logprobs: torch.Tensor
    top: torch.Tensor


@torch.inference_mode()
def read_with_transformers(network, ids):
    tokens = torch.tensor([ids], device=network.device)
    hidden = network.model(tokens, use_cache=False).last_hidden_state[0, :-1]
    logits = hidden.float() @ network.lm_head.weight.float().T
    given = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
    return Given(given.cpu(), logits.argmax(-1).cpu())


def read_with_service(service, prompt, arguments, policy):
    """Returns the tokens of prompt and answer, and what the service says about them."""
    logprobs, top, answer = [], [], []
    stream = service.stream(prompt, max_tokens=arguments.new_tokens, ignore_eos=True, logprobs=1, prompt_logprobs=1,
                            policy=policy)
    for response in stream:
        kind = response.WhichOneof("event")
        if kind == "prompt_logprobs":
            logprobs += response.prompt_logprobs.logprobs
            top += response.prompt_logprobs.top_token_ids
        elif kind == "tokens":
            answer += response.tokens.token_ids
            for token in response.tokens.logprobs:
                logprobs.append(token.logprob)
                top.append(token.top[0].token_id)
    return prompt + answer, Given(torch.tensor(logprobs), torch.tensor(top))


@dataclass
class Distance:
    mean: float
    largest: float
    same_top: int
    places: int


def distance(given, truth, places):
    differences = (given.logprobs[places] - truth.logprobs[places]).abs()
    same = (given.top[places] == truth.top[places]).sum().item()
    # A NaN is farther away than anything.
    differences = torch.nan_to_num(differences, nan=torch.inf)
    return Distance(differences.mean().item(), differences.max().item(), same, len(differences))


def is_near(ours, peer):
    # Other most probable tokens are rare and independent, so their number varies by its square root.
    other = peer.places - peer.same_top
    return (ours.mean <= MEAN_RATIO * peer.mean and ours.largest <= MAX_RATIO * peer.largest and
            ours.places - ours.same_top <= other + 3 * (other + 1) ** 0.5)


def compare(name, arguments, ways):
    """Prints the rows of a shape and returns whether all are near enough."""
    near = True
    with tempfile.TemporaryDirectory(prefix="kvasir-shape-") as folder:
        make_model(SHAPES[name], folder, arguments)
        truth_network = load_model(folder, torch.float32, "eager", arguments)
        peer_network = load_model(folder, torch.bfloat16, "sdpa", arguments)
        if arguments.wrong:
            change_config(folder, arguments.wrong)
        prompt = random.Random(name).choices(range(2, arguments.vocabulary), k=arguments.tokens)
        read = {}
        for way, flags in ways.items():
            with Service(folder, [*flags, *arguments.flags]) as service:
                read[way] = read_with_service(service, prompt, arguments, "")
        for way, (ids, ours) in read.items():
            truth = read_with_transformers(truth_network, ids)
            peer = read_with_transformers(peer_network, ids)
            split = len(prompt) - 1
            for part, places in (("prompt", slice(0, split)), ("answer", slice(split, None))):
                a, b = distance(ours, truth, places), distance(peer, truth, places)
                fine = is_near(a, b)
                near = near and fine
                print(f"| {name} | {way}, {part} | {a.mean:.4f} / {b.mean:.4f} | {a.largest:.3f} / {b.largest:.3f} | "
                      f"{a.same_top} / {b.same_top} of {a.places} | {truth.logprobs[places].std():.2f} | "
                      f"{'near' if fine else 'FAR'} |", flush=True)
    return near


def is_shape_near(name, arguments, ways):
    """Compares a shape; one that fails leaves the others their rows."""
    try:
        return compare(name, arguments, ways)
    except (AssertionError, RuntimeError, grpc.RpcError) as error:
        print(f"| {name} | failed: {error} |", flush=True)
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", default=",".join(SHAPES), help="names of shapes (default all)")
    parser.add_argument("--tokens", type=int, help="tokens of the prompt (default 3000 on a GPU, 700 on a CPU)")
    parser.add_argument("--new-tokens", type=int, default=100, help="decoded tokens (default 100)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, help="hidden size (default 1024 on a GPU, 256 on a CPU)")
    parser.add_argument("--vocabulary", type=int, help="default 32000 on a GPU, 2000 on a CPU")
    parser.add_argument("--wrong", default="", help="a change of config.json for the service, \"key=JSON\"")
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    if unknown := set(names) - set(SHAPES):
        parser.error(f"no shapes {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    gpu = arguments.device == "cuda"
    arguments.tokens = arguments.tokens or (3000 if gpu else 700)
    arguments.hidden = arguments.hidden or (1024 if gpu else 256)
    arguments.vocabulary = arguments.vocabulary or (32000 if gpu else 2000)
    arguments.flags = ["--dtype=bfloat16", "--kv-cache-dtype=bfloat16", f"--device={arguments.device}",
                       "--kv-device-size-gb=2", "--kv-host-size-gb=1",
                       f"--max-num-batched-tokens={512 if gpu else 256}"]
    torch.set_float32_matmul_precision("highest")
    transformers.utils.logging.disable_progress_bar()
    length = arguments.tokens + arguments.new_tokens
    # Budget and window hold the whole text, so that all of it is attended to and positions are the model's.
    ways = {
        "rotated": [],
        "compact": ["--position-extension=streaming", "--sparse-selector=quest", "--sparse-prefill-selector=quest",
                    f"--sparse-token-budget={length}"],
        "grouped": ["--position-extension=self_extend", f"--self-extend-window={length}"],
    }
    print("Ours / transformers in bfloat16, both beside transformers in float32.\n")
    print("| shape | keys, part | mean difference | largest | same most probable token | spread of logprobs | |")
    print("|---|---|---|---|---|---|---|")
    begin = time.monotonic()
    far = [name for name in names if not is_shape_near(name, arguments, ways)]
    print(f"\n{time.monotonic() - begin:.0f} s. " + (f"Too far: {', '.join(far)}" if far else "All are near."))
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    main()
