"""Includes go one way (docs/architecture.md). Prints every include that points the wrong way.

    kernels/base < proto < kernels < kvstore < worker
    coordinator sees proto, kernels/base, kvstore/index and kvstore/format/block.h only
    kernels and .cu files never include gRPC or protobuf messages of another layer

Inside a layer, folders do not include each other in a circle, and none has more than 30 files directly in it.
"""

import collections
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
    "kvstore/index": ["kvstore/index/", "kvstore/format/block.h", "kernels/base/"],
    "kvstore": ["kvstore/", "kernels/", "proto/"],
    "worker": ["worker/", "kvstore/", "kernels/", "proto/"],
    "coordinator": ["coordinator/", "proto/", "kernels/base/", "kvstore/index/", "kvstore/format/block.h"],
}
TOP_LEVEL = ("proto/", "kernels/", "kvstore/", "worker/", "coordinator/", "tests/")
NOT_IN_KERNELS = ("grpc", "google/protobuf")
LAYERS_WITH_ROOMS = ("kernels", "kvstore", "worker", "coordinator")
MOST_FILES = 30


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


def folder_includes(texts):
    """folder -> {folder that it includes: "file: include" of one such include}; `texts` is path -> text."""
    graph = collections.defaultdict(dict)
    for path, text in texts.items():
        folder = path.rpartition("/")[0]
        for include in INCLUDE.findall(text):
            other = include.rpartition("/")[0]
            if include.startswith(TOP_LEVEL) and other != folder and other.split("/")[0] == folder.split("/")[0]:
                graph[folder].setdefault(other, f"{path}: {include}")
    return graph


def circles(graph):
    """The includes of each circle of folders that is met on the way down from any folder."""
    done, found = set(), []

    def visit(folder, way):
        if folder in way:
            circle = way[way.index(folder):] + [folder]
            found.append([graph[a][b] for a, b in zip(circle, circle[1:])])
        elif folder not in done:
            for other in sorted(graph.get(folder, {})):
                visit(other, way + [folder])
            done.add(folder)

    for folder in sorted(graph):
        visit(folder, [])
    return found


def sources(*layers):
    return [p for layer in layers for p in sorted((ROOT / layer).rglob("*")) if p.suffix in SOURCES]


class IncludeDirection(unittest.TestCase):
    def test_every_include_points_down(self):
        files = sources("proto", *LAYERS_WITH_ROOMS)
        self.assertGreater(len(files), 50, "the sources were not found")
        found = [v for p in files for v in violations(str(p.relative_to(ROOT)), p.read_text())]
        self.assertEqual([], found, "\n" + "\n".join(found))

    def test_a_wrong_include_is_found(self):
        self.assertTrue(list(violations("kernels/dense/x.cc", '#include "worker/engine/engine.h"\n')))
        self.assertTrue(list(violations("coordinator/x.cc", '#include "kvstore/kv_store.h"\n')))
        self.assertTrue(list(violations("kernels/paged/x.cu", "#include <grpcpp/grpcpp.h>\n")))
        self.assertFalse(list(violations("worker/x.cc", '#include "kvstore/kv_store.h"\n')))

    def test_folders_do_not_include_each_other_in_a_circle(self):
        graph = folder_includes({str(p.relative_to(ROOT)): p.read_text() for p in sources(*LAYERS_WITH_ROOMS)})
        self.assertGreater(len(graph), 20, "the folders were not found")
        found = ["\n    ".join(circle) for circle in circles(graph)]
        self.assertEqual([], found, "\n" + "\n\n".join(found))

    def test_a_circle_is_found(self):
        texts = {"worker/a/x.h": '#include "worker/b/y.h"\n', "worker/b/y.h": '#include "worker/c/z.h"\n',
                 "worker/c/z.h": '#include "worker/a/x.h"\n', "worker/d/w.h": '#include "worker/a/x.h"\n'}
        self.assertEqual(circles(folder_includes(texts)), [["worker/a/x.h: worker/b/y.h", "worker/b/y.h: worker/c/z.h",
                                                            "worker/c/z.h: worker/a/x.h"]])
        del texts["worker/c/z.h"]
        self.assertFalse(circles(folder_includes(texts)))

    def test_no_folder_is_crowded(self):
        counts = collections.Counter(p.parent for layer in LAYERS_WITH_ROOMS for p in (ROOT / layer).rglob("*")
                                     if p.is_file() and "__pycache__" not in p.parts)
        crowded = {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_FILES}
        self.assertEqual({}, crowded, f"more than {MOST_FILES} files directly in a folder")


if __name__ == "__main__":
    unittest.main()
