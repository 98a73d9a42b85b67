"""Runs the files of `vllm bench serve` as they lie in vLLM's wheel, without the rest of vLLM and of torch.

    vllm_bench_client.py WHEEL TOKENIZER_JSON FLAGS_OF_BENCH_SERVE ...

Modules of vllm.benchmarks are read from the wheel. They import other modules of vLLM for images, sound, adapters and
tokenizers: these are empty here except for the few names that a benchmark of texts calls.
"""

import argparse
import importlib.abc
import importlib.machinery
import sys
import types

import tokenizers


class Tokenizer:
    """What the benchmark asks of a tokenizer: the ids of a text."""

    def __init__(self, path):
        self.tokenizer = tokenizers.Tokenizer.from_file(path)

    def __call__(self, text, add_special_tokens=True):
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return types.SimpleNamespace(input_ids=ids)


NAMES = {
    "vllm.tokenizers": {"get_tokenizer": lambda path, **_: Tokenizer(path)},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
    "vllm.utils.gc_utils": {"freeze_gc_heap": lambda: None},
    "vllm.utils.mistral": {"is_mistral_tokenizer": lambda _: False},
    "vllm.utils.network_utils": {"join_host_port": lambda host, port: f"{host}:{port}"},
}


class Nothing:
    """Stands for a name that a benchmark of texts imports and never calls."""

    def __init__(self, *_):
        pass

    def __getattr__(self, name):
        return Nothing()

    def __call__(self, *_, **__):
        return Nothing()


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith("vllm.") and not name.startswith("vllm.benchmarks"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__dict__.update(NAMES.get(spec.name, {}))
        module.__getattr__ = lambda name: type(name, (Nothing,), {})
        return module

    def exec_module(self, module):
        pass


def main():
    wheel, tokenizer, *flags = sys.argv[1:]
    sys.meta_path.insert(0, EmptyModules())
    vllm = types.ModuleType("vllm")
    vllm.__path__ = [f"{wheel}/vllm"]
    sys.modules["vllm"] = vllm
    from vllm.benchmarks import serve  # pylint: disable=import-outside-toplevel
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args([*flags, f"--tokenizer={tokenizer}"]))


if __name__ == "__main__":
    main()
