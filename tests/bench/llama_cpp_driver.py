#!/usr/bin/env python3
"""Runs llama.cpp, with requests and replies over pipes: peer_llama_cpp.py starts it in a separate environment.

    llama_cpp_driver.py BINDING MODEL.gguf THREADS STREAMS STREAM_TOKENS FLASH

BINDING: llama-cpp-python (llama.cpp's C functions) or xllamacpp (its server in this process, without HTTP).
STREAM_TOKENS: most tokens of each stream, prompt and answer. FLASH: on or off.

The first line of output is {"system": llama.cpp's description of the machine}. The reply to each line of input,
{"prompts": [[id, ...], ...], "new_tokens": N}, is a line with one entry per prompt:
{"times": seconds from the request to each token, "text": the answer}. Prompts of one line run at the same time. Greedy,
without an end token. Nothing is kept from one line to the next.
"""

import ctypes
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

BATCH = 512  # tokens computed together; for both of llama.cpp's limits


class XLlamaCpp:
    def __init__(self, path, threads, streams, stream_tokens, flash):
        import xllamacpp
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = streams * stream_tokens
        params.n_parallel = streams
        params.n_batch = params.n_ubatch = BATCH
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.flash_attn_type = xllamacpp.llama_flash_attn_type(1 if flash else 0)
        params.cache_prompt = False
        params.cache_ram_mib = params.n_ctx_checkpoints = params.n_gpu_layers = 0
        params.verbosity = 0
        self.system = xllamacpp.get_system_info()
        self.server = xllamacpp.Server(params)

    def run_one(self, prompt, new_tokens, begin):
        chunks = []
        self.server.handle_completions(
            {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "samplers": ["top_k"], "top_k": 1,
             "ignore_eos": True, "cache_prompt": False, "stream": True, "timings_per_token": True},
            lambda chunk: chunks.append((time.perf_counter() - begin, chunk)))
        failed = [chunk for _, chunk in chunks if "choices" not in chunk]
        if failed:
            raise RuntimeError(f"llama.cpp answered {failed[0]}")
        cached = chunks[-1][1]["timings"]["cache_n"]
        if cached:
            raise RuntimeError(f"llama.cpp took {cached} tokens of the prompt from its cache")
        times = []
        for at, chunk in chunks:  # the tokens of one character come at the same time
            times += [at] * (chunk["timings"]["predicted_n"] - len(times))
        return {"times": times, "text": "".join(chunk["choices"][0]["text"] for _, chunk in chunks)}

    def run(self, prompts, new_tokens):
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.run_one(prompt, new_tokens, begin), prompts))


class LlamaCpp:
    """Reads prompts one after the other. Then every step computes a token of each."""

    def __init__(self, path, threads, streams, stream_tokens, flash):
        import numpy
        from llama_cpp import llama_cpp
        self.np, self.lib = numpy, llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.system = llama_cpp.llama_print_system_info().decode()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = streams * stream_tokens, streams, False
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash else 0
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not make a context for {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.run([[1] * 8], 2)  # warm-up

    def decode(self, rows):
        """Decodes `rows`: (token, position, sequence, whether its next token is wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = self.lib.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def choose(self, row):
        logits = self.lib.llama_get_logits_ith(self.context, row)
        return int(self.np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def text_of(self, tokens):
        pieces = b""
        for token in tokens:
            piece = ctypes.create_string_buffer(256)
            size = self.lib.llama_token_to_piece(self.vocab, token, piece, len(piece), 0, False)
            pieces += piece.raw[:max(0, size)]
        return pieces.decode(errors="replace")

    def read(self, prompt, sequence):
        for begin in range(0, len(prompt), BATCH):
            end = min(begin + BATCH, len(prompt))
            self.decode([(prompt[i], i, sequence, i + 1 == len(prompt)) for i in range(begin, end)])
        return self.choose(end - begin - 1)

    def run(self, prompts, new_tokens):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        begin = time.perf_counter()
        times, tokens = [[] for _ in prompts], [[] for _ in prompts]

        def add(sequence, token):
            tokens[sequence].append(token)
            times[sequence].append(time.perf_counter() - begin)

        for sequence, prompt in enumerate(prompts):
            add(sequence, self.read(prompt, sequence))
        for step in range(new_tokens - 1):
            self.decode([(tokens[i][-1], len(prompt) + step, i, True) for i, prompt in enumerate(prompts)])
            for i in range(len(prompts)):
                add(i, self.choose(i))
        return [{"times": times[i], "text": self.text_of(tokens[i])} for i in range(len(prompts))]


def main():
    binding, path, threads, streams, stream_tokens, flash = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp's own output is no reply
    kind = {"xllamacpp": XLlamaCpp, "llama-cpp-python": LlamaCpp}[binding]
    peer = kind(path, int(threads), int(streams), int(stream_tokens), flash == "on")
    print(json.dumps({"system": peer.system.strip()}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(peer.run(request["prompts"], request["new_tokens"])), file=replies, flush=True)
    replies.close()
    os._exit(0)  # without waiting for the library's threads


if __name__ == "__main__":
    main()
