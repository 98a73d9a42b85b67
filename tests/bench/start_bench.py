#!/usr/bin/env python3
"""Measures the seconds until `kvasir serve` answers: after its start, and after its worker was killed.

The model is a random bfloat16 checkpoint of a published shape (16 GB for the default). It is written to --folder unless it
is there, and read once, so that every start finds it in the page cache. Each start serves one request and is stopped. In
the last one the worker is killed by SIGKILL --kills times. Needs only Python.

    tests/gpu.sh bundle out/gpu && out/gpu/tests/bench/start_bench.py  # on a GPU machine; gpu.sh table runs it too
    tests/bench/start_bench.py --device=cpu --layers=2 --build=build/cpu
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from padded_tokenizer import write_padded_tokenizer

TESTS = pathlib.Path(__file__).resolve().parents[1]
SHARD_BYTES = 5 << 30
BLOCK_ELEMENTS = 1 << 24
READY_WITHIN_S = 180
POLL_S = 0.01

# Upper bytes of bfloat16 without the sign: about the size of values in a matrix of 4,096 columns, and about 1.
SMALL, LARGE = 0x3C, 0x3F


def shapes(config):
    """Yields (name, shape) of every tensor of a Llama."""
    hidden, intermediate, vocab = (config[f"{name}_size"] for name in ("hidden", "intermediate", "vocab"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = hidden // heads
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows * head_dim, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, heads * head_dim)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (intermediate, hidden)
        yield prefix + "mlp.up_proj.weight", (intermediate, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, intermediate)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def size_bytes(shape):
    product = 2
    for size in shape:
        product *= size
    return product


class RandomWeights:
    """Bytes of bfloat16: norms 1, embeddings about 1, matrices about 1/64, of either sign. Each repeats one block."""

    def __init__(self):
        self.blocks = {}

    def block(self, exponent):
        if exponent not in self.blocks:
            signs = bytes(exponent | (byte & 1) << 7 for byte in range(256))
            block = bytearray(2 * BLOCK_ELEMENTS)
            block[0::2] = os.urandom(BLOCK_ELEMENTS)
            block[1::2] = os.urandom(BLOCK_ELEMENTS).translate(signs)
            self.blocks[exponent] = memoryview(bytes(block))
        return self.blocks[exponent]

    def write(self, name, shape, file):
        left = size_bytes(shape)
        if len(shape) == 1:
            file.write(struct.pack("<H", 0x3F80) * shape[0])
            return
        block = self.block(LARGE if "embed" in name else SMALL)
        while left > 0:
            left -= file.write(block[:left])


def split(tensors):
    """Returns shards of at most SHARD_BYTES, in order."""
    shard, used = [], 0
    for name, shape in tensors:
        if shard and used + size_bytes(shape) > SHARD_BYTES:
            yield shard
            shard, used = [], 0
        shard.append((name, shape))
        used += size_bytes(shape)
    yield shard


def write_shard(path, shard, weights):
    header, end = {}, 0
    for name, shape in shard:
        begin, end = end, end + size_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shard:
            weights.write(name, shape, file)


def make_checkpoint(folder, shape, layers):
    """Writes the checkpoint under another name first, so that a checkpoint with its name is complete."""
    if folder.exists():
        return
    begin = time.monotonic()
    draft = folder.with_name(folder.name + ".new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    config = json.loads((TESTS / "model" / "shapes" / shape / "config.json").read_text())
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    (draft / "config.json").write_text(json.dumps(config))
    write_padded_tokenizer(draft, config["vocab_size"])
    shards = list(split(shapes(config)))
    weights, index = RandomWeights(), {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_shard(draft / name, shard, weights)
        index.update({tensor: name for tensor, _ in shard})
    (draft / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    draft.rename(folder)
    print(f"checkpoint written in {time.monotonic() - begin:.0f} s", file=sys.stderr)


def read_whole(path):
    memory = bytearray(64 << 20)
    total = 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(memory):
            total += count
    return total


def fill_page_cache(folder):
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        total = sum(threads.map(read_whole, sorted(folder.glob("*.safetensors"))))
    print(f"{total / 1e9:.1f} GB read in {time.monotonic() - begin:.1f} s", file=sys.stderr)


class Server:
    """`kvasir serve` with one local worker. `ready_s` is the time from the start of its process until it is ready."""

    def __init__(self, kvasir, model, flags):
        self.kvasir = kvasir
        self.folder = tempfile.TemporaryDirectory(prefix="kvasir-start-")
        self.log_path = pathlib.Path(self.folder.name) / "server.log"
        ready = pathlib.Path(self.folder.name) / "ready"
        command = [str(kvasir), "serve", f"--model={model}", "--port=0", "--http-port=0", "--metrics-port=0", f"--ready-file={ready}",
                   *flags]
        begin = time.monotonic()
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() - begin > READY_WITHIN_S:
                self.process.kill()
                sys.exit(f"the server did not become ready:\n{self.log()}")
            time.sleep(POLL_S)
        self.ready_s = time.monotonic() - begin
        self.address = dict(line.split(": ", 1) for line in ready.read_text().splitlines())["grpc"]

    def log(self):
        return self.log_path.read_text(errors="replace")

    def stages(self):
        """Returns the worker's log line about each of its starts."""
        return re.findall(r"ready after (.*)", self.log())

    def try_generate(self):
        return subprocess.run([str(self.kvasir), "generate", f"--server={self.address}", "--prompt=hello",
                               "--max-tokens=4", "--quiet"], capture_output=True, check=False).returncode == 0

    def kill_worker(self):
        """Returns the seconds from killing the worker by SIGKILL to the end of the next answered request."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task")
        workers = [int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()]
        if len(workers) != 1:
            sys.exit(f"the server has {len(workers)} processes for workers, expected 1")
        begin = time.monotonic()
        os.kill(workers[0], signal.SIGKILL)
        while pathlib.Path(f"/proc/{workers[0]}").exists() and time.monotonic() - begin < READY_WITHIN_S:
            time.sleep(POLL_S)
        gone = time.monotonic() - begin
        while not self.try_generate():
            if time.monotonic() - begin > READY_WITHIN_S:
                sys.exit(f"the server did not serve again:\n{self.log()}")
            time.sleep(POLL_S)
        return gone, time.monotonic() - begin

    def stop(self):
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(READY_WITHIN_S) != 0:
            sys.exit(f"the server exited with {self.process.returncode}:\n{self.log()}")
        self.folder.cleanup()
        return time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a Llama of tests/model/shapes (default llama-3.1-8b)")
    parser.add_argument("--layers", type=int, default=0, help="layers of the model (default: the shape's)")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvasir-start-bench"),
                        help="for the checkpoint (default /tmp/kvasir-start-bench)")
    parser.add_argument("--build", type=pathlib.Path, default=TESTS.parent,
                        help="the folder with coordinator/kvasir and worker/kvasir-worker (default: of a bundle)")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--flags", default="", help="more flags of the service")
    arguments = parser.parse_args()
    model = arguments.folder / f"{arguments.shape}-{arguments.layers or 'all'}"
    make_checkpoint(model, arguments.shape, arguments.layers)
    fill_page_cache(model)
    kvasir = arguments.build.resolve() / "coordinator" / "kvasir"
    flags = [f"--device={arguments.device}", *shlex.split(arguments.flags)]
    rows, stages = [], []
    for i in range(arguments.starts):
        server = Server(kvasir, model, flags)
        begin = time.monotonic()
        if not server.try_generate():
            sys.exit(f"the first request was not answered:\n{server.log()}")
        first = time.monotonic() - begin
        rows.append((f"start {i + 1}", f"{server.ready_s:.1f}", f"first answer {first:.1f} s later"))
        for kill in range(arguments.kills if i + 1 == arguments.starts else 0):
            gone, again = server.kill_worker()
            rows.append((f"worker killed, {kill + 1}", f"{again:.1f}", f"its process was gone after {gone:.1f} s"))
        stages += server.stages()
        log = server.log()
        rows.append((f"stop {i + 1}", f"{server.stop():.1f}", ""))
    print(log, file=sys.stderr)
    for line in stages:
        print(f"ready after {line}")
    print("| | s | |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
