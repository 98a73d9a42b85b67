#!/usr/bin/env python3
"""The service beside llama.cpp on the CPU: same weights, same token ids, same cores, measured in turn. Prints Markdown.

    deploy/fetch_smollm2.sh /tmp/smollm2
    tests/bench/peer_llama_cpp.py --model /tmp/smollm2                                    the whole table
    tests/bench/peer_llama_cpp.py --model /tmp/smollm2 --prompts 64,512 --runs 1          a quick look
    tests/bench/peer_llama_cpp.py --model /tmp/smollm2 --sides kvasir-bf16 --policies dense,quest --prompts 2048
    tests/bench/peer_llama_cpp.py --model /tmp/smollm2 --isa native                       both sides' best instruction set

Compares `kvasir serve`, over gRPC as any client, with llama.cpp inside its own process, without a network, which is an
advantage for the peer. In one run a side reads a prompt and then generates. The table has the median of --runs for each
length of prompt. Each run has its own prompt, cut from English text.

 - "reads": time from the request to the first token, with no part of the prompt cached.
 - "a token": mean time between the tokens after the first.
 - Sparse policies decode sparsely after a prompt that was read densely. The dense run before them read it, and they find
   it in the prefix cache, so the table has no reading time for them.
 - "streams": that many prompts at the same time: the time until all are read, and tokens per second of all while every
   stream generates.
 - A ratio is our time over llama.cpp's: below 1 we are faster. bfloat16 is compared with llama.cpp's fastest 16-bit type
   that was run, int8 with its Q8_0.

llama.cpp gets its best settings: flash attention is tried on and off at each length, and the faster setting is used and
named. It has batches of 512 tokens and as many threads as ours. The rest are its defaults (mmap, a 16-bit KV cache).

Instruction sets. llama.cpp is PyPI's llama-cpp-python, which pip builds from source: for AVX2, FMA and F16C only with
--isa avx2, for this machine with --isa native. That needs a C++ compiler, CMake and some minutes, once. KVASIR_CPU_ISA
limits our kernels to AVX2, unless it is set by hand. The run ends when the server names a wider path anyway.
--peer xllamacpp takes PyPI's wheel of that name. It is for AVX2 and needs no compiler, but reads prompts more slowly than
a local build, so claims must not rest on it.

Needs the build (KVASIR_BUILD, default build/cpu), the packages of deploy/install_packages.sh, python3-venv and, the first
time, PyPI. Environments and GGUF files are kept in --work.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from peer_tables import BUDGET, stream_table, streams_table  # noqa: E402
from support.service import KVASIR, ROOT, Service, generation_pb2  # noqa: E402

PACKAGES = {"llama-cpp-python": "llama-cpp-python==0.3.36", "xllamacpp": "xllamacpp==2026.10.11549"}
TOOLS = ("numpy==2.4.6", "gguf==0.19.0")
BUILD_OPTIONS = {"avx2": "-DGGML_NATIVE=OFF", "native": "-DGGML_NATIVE=ON"}  # llama.cpp's; without native it is AVX2
PEER_TYPES = {"llama-f16": "F16", "llama-bf16": "BF16", "llama-q8_0": "Q8_0"}
OUR_FLAGS = {"kvasir-bf16": [], "kvasir-int8": ["--weights-dtype=int8"]}
SIDES = (*PEER_TYPES, *OUR_FLAGS)
DECODE = {  # except dense, which is the server's default policy
    "quest": {"quest": {}},
    "tokenselect": {"tokenselect": {}},
    "infinitehip": {"infinitehip": {}},
}
NUMBERS = {"sink_tokens": 128, "window_tokens": 512, "token_budget": BUDGET}
CALIBRATION_TOKENS = 16
ONE_TRY_TOKENS = 2048  # beyond this a try takes minutes
WARM_UP_TOKENS = 64
SPARE_TOKENS = 64  # tokens of a stream besides prompt and answer


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass
class Run:
    """One prompt and its answer: seconds to the first token, seconds per later token, and the answer's text."""
    read: float
    token: float
    text: str = ""

    @classmethod
    def of(cls, times, text=""):
        return cls(times[0], (times[-1] - times[0]) / (len(times) - 1), text)


# --- Environment -----------------------------------------------------------------------------------------------------


def make_environment(work, peer, isa):
    """Returns the Python of an environment that has llama.cpp and the tools."""
    packages = (PACKAGES[peer], *TOOLS)
    venv = work / f"venv-{peer}-{isa}"
    done = venv / "installed"
    if not done.exists() or done.read_text() != " ".join(packages):
        say(f"installing {', '.join(packages)} into {venv}")
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, stdout=sys.stderr)
        # Without the cache, where pip would find its build for another instruction set.
        built = subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", "--no-cache-dir", *packages],
                               stdout=sys.stderr, env={**os.environ, "CMAKE_ARGS": BUILD_OPTIONS[isa]})
        if built.returncode:
            sys.exit(f"pip could not install {', '.join(packages)}: is PyPI reachable, is a C++ compiler here?")
        done.write_text(" ".join(packages))
    return venv / "bin" / "python"


def write_gguf(python, work, model, file_type):
    """Writes the model as GGUF when there is none or the weights have changed. Returns the file."""
    weights = sorted(model.glob("*.safetensors"))
    if not weights:
        sys.exit(f"{model} has no *.safetensors; deploy/fetch_smollm2.sh makes such a folder")
    marks = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    path = work / f"{hashlib.sha256(repr(marks).encode()).hexdigest()[:12]}-{file_type}.gguf"
    if not path.exists():
        say(f"writing {path}")
        partial = path.with_suffix(".partial")
        subprocess.run([str(python), str(HERE / "write_gguf.py"), str(model), file_type, str(partial)], check=True,
                       stdout=sys.stderr)
        partial.rename(path)
    return path


def machine(threads):
    """Returns the model of the CPU, its cores and its vector instructions."""
    info = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    values = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in info if ":" in line}
    known = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    flags = [name for name in known if name in values.get("flags", "").split()]
    return (f"{values.get('model name', platform.processor())}, {os.cpu_count()} cores, {platform.machine()} "
            f"({' '.join(flags)}), {threads} threads on cores {sorted(os.sched_getaffinity(0))}")


def commit():
    asked = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"], capture_output=True,
                           text=True)
    return asked.stdout.strip() or "unknown"


# --- The two sides ---------------------------------------------------------------------------------------------------


class Peer:
    """A process with one llama.cpp: a type of weights, a number of streams, flash attention on or off."""

    def __init__(self, python, binding, path, threads, streams, stream_tokens, flash):
        command = [str(python), str(HERE / "llama_cpp_driver.py"), binding, str(path), str(threads), str(streams),
                   str(stream_tokens), flash]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.system = self._reply()["system"]

    def _reply(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"llama.cpp ended:\n{self.log.read()[-4000:]}")
        return json.loads(line)

    def run(self, prompts, new_tokens):
        """Returns the answers to prompts asked at the same time: [{"times", "text"}]."""
        print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self.process.stdin, flush=True)
        return self._reply()

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


class PeerSide:
    """llama.cpp with one type of weights."""

    def __init__(self, name, arguments, python):
        self.name, self.arguments, self.python = name, arguments, python
        self.path = write_gguf(python, arguments.work, arguments.model, PEER_TYPES[name])
        self.policies = ["dense"]
        self.flash = {}  # the faster setting, by (tokens, streams)
        self.system = ""

    def start(self, tokens, streams, flash):
        room = tokens + self.arguments.new_tokens + SPARE_TOKENS
        peer = Peer(self.python, self.arguments.peer, self.path, self.arguments.threads, streams, room, flash)
        self.system = peer.system
        return peer

    def prepare(self, tokens, streams, prompts):
        """Starts llama.cpp with the faster of the two kinds of attention, and warms it up."""
        settings = ("on", "off") if self.arguments.flash == "try" else (self.arguments.flash,)
        peers = {flash: self.start(tokens, streams, flash) for flash in settings}
        for peer in peers.values():
            peer.run([prompt[:WARM_UP_TOKENS] for prompt in prompts], 2)
        chosen = settings[0] if len(settings) == 1 else self.faster(peers, tokens, streams, prompts)
        for flash in set(settings) - {chosen}:
            peers[flash].close()
        self.flash[tokens, streams], self.peer = chosen, peers[chosen]

    def faster(self, peers, tokens, streams, prompts):
        """Returns the peer that reads the prompts and generates in less time: the best of two tries, in turn."""
        totals = {flash: float("inf") for flash in peers}
        for flash in (*peers, *peers) if tokens <= ONE_TRY_TOKENS else peers:
            answers = peers[flash].run(prompts, CALIBRATION_TOKENS + 1)
            run = Run.of(max((answer["times"] for answer in answers), key=lambda times: times[-1]))
            total = run.read + self.arguments.new_tokens * run.token
            say(f"{self.name}, {tokens} tokens, {streams} streams, flash attention {flash}: {total:.2f} s expected")
            totals[flash] = min(totals[flash], total)
        return min(totals, key=totals.get)

    def finish(self):
        self.peer.close()

    def measure(self, prompts, policy, tenant):
        return [(answer["times"], answer["text"]) for answer in self.peer.run(prompts, self.arguments.new_tokens + 1)]


class OurSide:
    """`kvasir serve` with one type of weights."""

    def __init__(self, name, arguments, folder, stack):
        self.name, self.arguments = name, arguments
        self.policies = arguments.policies
        declared = folder / "policies.yaml"
        declared.write_text(json.dumps([  # JSON is YAML
            {"name": policy, "prefill": {"all": {}, **NUMBERS}, "decode": {**DECODE[policy], **NUMBERS}}
            for policy in DECODE]))
        flags = [f"--threads={arguments.threads}", "--mass-sample-rate=0", f"--policies={declared}", *OUR_FLAGS[name],
                 *arguments.flag]
        say(f"starting kvasir serve {' '.join(flags)}")
        self.service = stack.enter_context(Service(arguments.model.resolve(), flags))
        self.paths = re.findall(r"attention [^,\s]+, products [^,\s]+", self.service.log())
        if os.environ.get("KVASIR_CPU_ISA") == "avx2" and "avx512" in "".join(self.paths):
            sys.exit(f"the server is to be held to AVX2, but names {'; '.join(self.paths)}")

    def prepare(self, tokens, streams, prompts):
        self.service.generate(prompts[0][:WARM_UP_TOKENS], max_tokens=2, ignore_eos=True, tenant_id="warm-up")

    def finish(self):
        pass

    def measure(self, prompts, policy, tenant):
        """Asks prompts at the same time. The dense policy must read them all, without cached tokens."""
        answers = [None] * len(prompts)

        def ask(i):
            answers[i] = self.service.generate(
                prompts[i], policy="" if policy == "dense" else policy, max_tokens=self.arguments.new_tokens + 1,
                ignore_eos=True, tenant_id=f"{tenant}-{i}", timeout_s=3600)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if any(answer is None for answer in answers):
            sys.exit(f"{self.name} did not answer:\n{self.service.log()[-4000:]}")
        if policy == "dense" and any(answer.cached_tokens for answer in answers):
            sys.exit("a prompt was in the prefix cache: reading times would be wrong")
        return [(answer.token_times, answer.text) for answer in answers]


# --- Measuring -------------------------------------------------------------------------------------------------------


class Prompts:
    """Token ids of English text: a different piece for every run, so that no two have the same beginning."""

    def __init__(self, service, paths):
        text = "\n".join(path.read_text(errors="replace") for path in paths)
        self.ids = list(service.stub.Tokenize(generation_pb2.TokenizeRequest(text=text)).token_ids)
        self.taken = 0

    def take(self, tokens, count):
        pieces = []
        for _ in range(count):
            begin = (self.taken * 997) % max(1, len(self.ids) - tokens)
            self.taken += 1
            piece = self.ids[begin:begin + tokens]
            if len(piece) < tokens:
                sys.exit(f"the text has {len(self.ids)} tokens, a prompt {tokens}; name more with --text")
            pieces.append(piece)
        return pieces


def together(answers):
    """Returns (seconds until all are read, tokens per second while every stream generates) of simultaneous answers."""
    all_read = max(times[0] for times, _ in answers)
    first_end = min(times[-1] for times, _ in answers)
    made = sum(sum(all_read < at <= first_end for at in times) for times, _ in answers)
    return all_read, made / (first_end - all_read) if first_end > all_read else float("nan")


def check_answers(side, answers, new_tokens):
    counts = {len(times) for times, _ in answers}
    if counts != {new_tokens + 1}:
        sys.exit(f"{side.name} generated {sorted(counts)} tokens instead of {new_tokens + 1}")


def measure_length(sides, prompts, tokens, streams, arguments):
    """Returns all runs at one length: {(side, policy): [Run or (seconds, tokens per second)]}."""
    results = {(side.name, policy): [] for side in sides for policy in side.policies}
    for side in sides:
        side.prepare(tokens, streams, prompts.take(tokens, streams))
    for number in range(arguments.runs):
        pieces = prompts.take(tokens, streams)
        order = sides if number % 2 == 0 else sides[::-1]
        for side, policy in ((side, policy) for side in order for policy in side.policies):
            tenant = f"{side.name}-{tokens}-{streams}-{number}"
            answers = side.measure(pieces, policy, tenant)
            check_answers(side, answers, arguments.new_tokens)
            result = Run.of(*answers[0]) if streams == 1 else together(answers)
            results[side.name, policy].append(result)
            shown = (f"{result.read:.3f} s, {1e3 * result.token:.2f} ms a token" if streams == 1
                     else f"all read after {result[0]:.3f} s, {result[1]:.1f} tokens/s")
            say(f"{tokens} tokens, {streams} streams, run {number + 1}, {side.name} {policy}: {shown}")
        if streams == 1:
            texts = [results[side.name, "dense"][-1].text for side in sides]
            say(f"the first {len(os.path.commonprefix(texts))} characters of all answers are the same")
    for side in sides:
        side.finish()
    return results


# --- The command -----------------------------------------------------------------------------------------------------


def numbers(text):
    return [int(part.replace("_", "")) for part in text.split(",") if part]


def names(known):
    def parse(text):
        asked = [part for part in text.split(",") if part]
        unknown = [name for name in asked if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
        return asked
    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="Hugging Face folder of a Llama model")
    parser.add_argument("--isa", choices=("avx2", "native"), default="avx2", help="instruction set of both sides (default avx2)")
    parser.add_argument("--peer", choices=tuple(PACKAGES), default="llama-cpp-python", help="PyPI's package of llama.cpp")
    parser.add_argument("--prompts", type=numbers, default=[64, 512, 2048, 6000], metavar="TOKENS,...",
                        help="lengths of prompts (default 64,512,2048,6000); empty: none")
    parser.add_argument("--stream-prompts", type=numbers, default=[512], metavar="TOKENS,...",
                        help="lengths of prompts of several streams at once (default 512); empty: none")
    parser.add_argument("--streams", type=int, default=4, help="streams at once (default 4)")
    parser.add_argument("--sides", type=names(SIDES), default=["llama-f16", "llama-q8_0", "kvasir-bf16", "kvasir-int8"],
                        metavar="SIDE,...", help=f"of {', '.join(SIDES)} (default: all but llama-bf16; int8 if the server has it)")
    parser.add_argument("--policies", type=names(("dense", *DECODE)), default=["dense", *DECODE], metavar="POLICY,...",
                        help=f"ours: of dense, {', '.join(DECODE)} (default: all); dense is always run, for it reads the prompts")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens after the first (default 64)")
    parser.add_argument("--runs", type=int, default=3, help="runs at each length, of which the median counts (default 3)")
    parser.add_argument("--flash", choices=("try", "on", "off"), default="try",
                        help="llama.cpp's flash attention (default: what is faster at each length, tried before)")
    parser.add_argument("--threads", type=int, default=2, help="threads and cores of either side (default 2)")
    parser.add_argument("--flag", action="append", default=[], metavar="--NAME=VALUE", help="further flag of kvasir serve")
    parser.add_argument("--text", type=pathlib.Path, nargs="+", default=sorted((ROOT / "docs").glob("*.md")),
                        help="where prompts are cut from (default: docs/*.md)")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / "peer-llama-cpp",
                        help="folder of environments and GGUF files (default build/peer-llama-cpp)")
    parser.add_argument("--raw", type=pathlib.Path, metavar="FILE", help="also writes every run as JSON")
    arguments = parser.parse_args()
    arguments.policies = ["dense", *(policy for policy in arguments.policies if policy != "dense")]
    if (arguments.peer, arguments.isa) == ("xllamacpp", "native"):
        parser.error("--peer xllamacpp is built for AVX2; --isa native takes --peer llama-cpp-python")
    if arguments.new_tokens < CALIBRATION_TOKENS or arguments.runs < 1:
        parser.error(f"--new-tokens is at least {CALIBRATION_TOKENS}, --runs at least 1")
    return arguments


def served_sides(asked):
    """Leaves out int8 when this build's server does not know it."""
    help_text = subprocess.run([str(KVASIR), "serve", "--help"], capture_output=True, text=True).stdout
    if "--weights-dtype" in help_text:
        return asked
    if "kvasir-int8" in asked:
        say("this build's server has no --weights-dtype: without kvasir-int8")
    return [side for side in asked if side != "kvasir-int8"]


def print_head(arguments, python, sides):
    speed = subprocess.run([str(python), str(HERE / "read_speed.py"), str(arguments.threads)], capture_output=True, text=True,
                           check=True).stdout.strip()
    print(f"{machine(arguments.threads)}; reads {speed} GB/s from memory with as many threads.")
    isa = os.environ.get("KVASIR_CPU_ISA")
    forced = f"KVASIR_CPU_ISA={isa}" if isa else "no instruction set forced"
    print(f"Kvasir {commit()}, {forced}"
          + "".join(f"; {side.name}: {', '.join(side.paths)}" for side in sides if getattr(side, "paths", [])))
    systems = {side.system for side in sides if getattr(side, "system", "")}
    print(f"llama.cpp of {PACKAGES[arguments.peer]}: {' '.join(systems)}")
    print(f"Weights of {arguments.model.name}; {arguments.new_tokens} tokens after the first, median of {arguments.runs}.\n")


def main():
    arguments = parse_arguments()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:arguments.threads])  # also for the processes that it starts
    if arguments.isa == "avx2":
        os.environ.setdefault("KVASIR_CPU_ISA", "avx2")
    arguments.work.mkdir(parents=True, exist_ok=True)
    python = make_environment(arguments.work, arguments.peer, arguments.isa)
    asked = served_sides(arguments.sides)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvasir-peer-"))
        sides = [PeerSide(name, arguments, python) for name in asked if name in PEER_TYPES]
        ours = [OurSide(name, arguments, pathlib.Path(folder), stack) for name in asked if name in OUR_FLAGS]
        if not ours:
            sys.exit("name at least one side of ours: the server tokenizes the prompts")
        sides += ours
        prompts = Prompts(ours[0].service, arguments.text)
        single = {tokens: measure_length(sides, prompts, tokens, 1, arguments) for tokens in arguments.prompts}
        several = {tokens: measure_length(sides, prompts, tokens, arguments.streams, arguments)
                   for tokens in arguments.stream_prompts}
    flash = {(side.name, *key): value for side in sides for key, value in getattr(side, "flash", {}).items()}
    print_head(arguments, python, sides)
    if single:
        print("\n".join(stream_table(single, flash)), "\n")
    if several:
        print("\n".join(streams_table(several, arguments.streams, flash)))
    if arguments.raw:
        arguments.raw.write_text(json.dumps([
            {"tokens": tokens, "streams": streams, "side": side, "policy": policy,
             "runs": [[run.read, run.token] if streams == 1 else list(run) for run in runs]}
            for streams, results in ((1, single), (arguments.streams, several))
            for tokens, by_side in results.items() for (side, policy), runs in by_side.items()], indent=1) + "\n")


if __name__ == "__main__":
    main()
