"""Includes go one way (docs/architecture.md). Prints every include that points the wrong way.

    kernels/base < proto < kernels < kvstore < worker
    coordinator sees proto, kernels/base, kvstore/index and kvstore/block.h only
    kernels and .cu files never include gRPC or protobuf messages of another layer
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
SOURCES = {".h", ".cc", ".cu", ".cuh"}

# Layer of a path -> prefixes of our headers that it may include.
ALLOWED = {
    "kernels/base": ["kernels/base/"],
    "proto": ["proto/", "kernels/base/"],
    "kernels": ["kernels/"],
    "kvstore/index": ["kvstore/index/", "kvstore/block.h", "kernels/base/"],
    "kvstore": ["kvstore/", "kernels/", "proto/"],
    "worker": ["worker/", "kvstore/", "kernels/", "proto/"],
    "coordinator": ["coordinator/", "proto/", "kernels/base/", "kvstore/index/", "kvstore/block.h"],
}
TOP_LEVEL = ("proto/", "kernels/", "kvstore/", "worker/", "coordinator/", "tests/")
NOT_IN_KERNELS = ("grpc", "google/protobuf")


def layer_of(path: str) -> str:
    """Returns the longest matching layer."""
    return max((layer for layer in ALLOWED if path.startswith(layer + "/")), key=len)


def violations(path: str, text: str):
    """Yields the includes of `path` that point the wrong way."""
    layer = layer_of(path)
    for include in INCLUDE.findall(text):
        ours = include.startswith(TOP_LEVEL)
        if ours and not include.startswith(tuple(ALLOWED[layer])):
            yield f"{path}: {include} ({layer} may include {', '.join(ALLOWED[layer])})"
        elif layer.startswith("kernels") and include.startswith(NOT_IN_KERNELS):
            yield f"{path}: {include} (kernels know no RPC and no protobuf)"


class IncludeDirection(unittest.TestCase):
    def test_every_include_points_down(self):
        files = [p for layer in ("proto", "kernels", "kvstore", "worker", "coordinator")
                 for p in sorted((ROOT / layer).rglob("*")) if p.suffix in SOURCES]
        self.assertGreater(len(files), 50, "the sources were not found")
        found = [v for p in files for v in violations(str(p.relative_to(ROOT)), p.read_text())]
        self.assertEqual([], found, "\n" + "\n".join(found))

    def test_a_wrong_include_is_found(self):
        self.assertTrue(list(violations("kernels/dense/x.cc", '#include "worker/engine.h"\n')))
        self.assertTrue(list(violations("coordinator/x.cc", '#include "kvstore/kv_store.h"\n')))
        self.assertTrue(list(violations("kernels/paged/x.cu", "#include <grpcpp/grpcpp.h>\n")))
        self.assertFalse(list(violations("worker/x.cc", '#include "kvstore/kv_store.h"\n')))


if __name__ == "__main__":
    unittest.main()
