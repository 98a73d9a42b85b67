"""Documents say what the tree has: links lead somewhere, and every path, flag and metric that they name exists.

Pages of a day (docs/measurements/20*.md) are records: only their links are checked. Run by ctest; needs no build.
"""

import functools
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("coordinator/", "deploy/", "docs/", "kernels/", "kvstore/", "proto/", "tests/", "worker/")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?<![\w./<-])((?:%s)[\w./*-]*[\w*/])" % "|".join(FOLDERS))
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?![\w*-])")
METRIC = re.compile(r"\bkvasir_[a-z0-9_]+\b")
# Prometheus makes these of a histogram; targets of the build begin like metrics.
SUFFIX = re.compile(r"_(bucket|sum|count)$")
TARGETS = {"kvasir_python_proto"}


@functools.lru_cache(None)
def documents():
    return sorted(p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/README.md")])


def current():
    return [p for p in documents() if not re.match(r"20\d\d-", p.name)]


@functools.lru_cache(None)
def flags_of_tools():
    """Flags of our scripts and benchmarks, and of the programs that the pages call."""
    found = {"preset", "build", "target", "gtest_filter", "help", "print-config", "config", "version", "tool", "component", "now"}
    for pattern in ("tests/**/*.py", "tests/**/*.cc", "tests/**/*.cu", "tests/**/*.h", "deploy/**/*", "tests/*.sh"):
        for path in ROOT.glob(pattern):
            if path.is_file():
                found |= set(FLAG.findall(path.read_text(errors="replace")))
    return found | {name.replace("_", "-") for name in found}


@functools.lru_cache(None)
def flags_of_programs():
    config = (ROOT / "proto/kvasir/v1/config.proto").read_text()
    return {name.replace("_", "-") for name in re.findall(r"^\s*(?:optional |repeated )?\w+ (\w+) = \d+ \[\(flag\)", config, re.M)}


def metrics():
    text = "".join(p.read_text() for folder in ("coordinator", "worker", "proto") for p in (ROOT / folder).rglob("*.cc"))
    return set(re.findall(r'"(kvasir_[a-z0-9_]+)"', text))


def anchors(path):
    """Anchors that GitHub makes of headings: lower case, spaces become dashes, punctuation goes."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def registered_tests():
    """(names of tests in ctest, program -> cases of its Google tests)."""
    programs, cases = set(), {}
    for path in [*ROOT.glob("tests/**/CMakeLists.txt")]:
        text = path.read_text()
        programs |= set(re.findall(r"kvasir_python_test\((\w+) ", text))
        for name, sources in re.findall(r"kvasir_test\((\w+)\s+SRCS (.*?)\s+DEPS", text, re.S):
            programs.add(name)
            code = "".join((path.parent / source).read_text() for source in sources.split() if "$" not in source)
            cases[name] = {f"{suite}.{case}" for suite, case in re.findall(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)", code, re.M)}
    return programs, cases


class Docs(unittest.TestCase):
    def expect_none(self, found):
        self.assertEqual([], found, "\n" + "\n".join(found))

    def test_links_lead_somewhere(self):
        found = []
        for page in documents():
            for target in LINK.findall(page.read_text()):
                if re.match(r"[a-z]+:", target):
                    continue
                name, _, anchor = target.partition("#")
                path = (page.parent / name).resolve() if name else page
                if not path.exists():
                    found.append(f"{page.relative_to(ROOT)}: {target}")
                elif anchor and path.suffix == ".md" and anchor not in anchors(path):
                    found.append(f"{page.relative_to(ROOT)}: {target} (no such heading)")
        self.expect_none(found)

    def test_paths_exist(self):
        found = []
        for page in current():
            for code in CODE.findall(page.read_text()):
                for path in PATH.findall(code):
                    if not (any(ROOT.glob(path.rstrip("/"))) or any(ROOT.glob(path + ".*"))):
                        found.append(f"{page.relative_to(ROOT)}: {path}")
        self.expect_none(found)

    def test_flags_exist(self):
        known = flags_of_programs() | flags_of_tools()
        found = [f"{page.relative_to(ROOT)}: --{flag}" for page in current()
                 for flag in sorted(set(FLAG.findall(page.read_text()))) if flag not in known]
        self.expect_none(found)

    def test_metrics_exist(self):
        known = metrics() | TARGETS
        found = [f"{page.relative_to(ROOT)}: {name}" for page in current()
                 for name in sorted(set(METRIC.findall(page.read_text())))
                 if name not in known and SUFFIX.sub("", name) not in known and not name.startswith("kvasir_kernels_")]
        self.expect_none(found)

    def test_every_metric_is_explained(self):
        text = (ROOT / "docs/operations.md").read_text() + (ROOT / "docs/bounds.md").read_text()
        self.assertGreater(len(metrics()), 50)
        self.assertGreater(len([name for name in metrics() if name in text]), 40, "operations.md lists few metrics")

    def test_python_snippets_use_names_of_the_protos(self):
        found, snippets = [], 0
        for page in current():
            for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
                snippets += 1
                compile(code, str(page), "exec")
                for proto, name in re.findall(r"\b(generation|sparsity)_pb2\.(\w+)", code):
                    text = (ROOT / f"proto/kvasir/v1/{proto}.proto").read_text()
                    if not re.search(rf"^(message|enum) {name} ", text, re.M):
                        found.append(f"{page.relative_to(ROOT)}: {proto}.proto has no {name}")
        self.assertGreater(snippets, 0)
        self.expect_none(found)

    def test_policies_have_fields_of_the_proto(self):
        fields = set(re.findall(r"(\w+) = \d+", (ROOT / "proto/kvasir/v1/sparsity.proto").read_text()))
        found, policies = [], 0
        for page in current():
            for policy in re.findall(r"^ *- name: [\w-]+\n(?:^ +(?:prefill|decode|tail_tokens|  ).*\n)+", page.read_text(), re.M):
                policies += 1
                found += [f"{page.relative_to(ROOT)}: {name}" for name in re.findall(r"(\w+):", policy) if name not in fields]
        self.assertGreater(policies, 5)
        self.expect_none(found)

    def test_pages_are_in_the_index(self):
        index = (ROOT / "docs/README.md").read_text() + (ROOT / "docs/measurements.md").read_text()
        self.expect_none([str(page.relative_to(ROOT)) for page in documents()
                          if page.is_relative_to(ROOT / "docs") and page.name != "README.md" and page.name not in index])

    def test_every_row_of_the_fault_matrix_is_told(self):
        page = (ROOT / "tests/faults/README.md").read_text()
        rows = [int(row) for cell in re.findall(r"^\| ([\d, ]+) \|", page, re.M) for row in cell.split(",")]
        self.assertEqual(list(range(1, 77)), sorted(rows))
        programs, cases = registered_tests()
        found, named = [], 0
        for program, names in re.findall(r"(?<![\w/])(\w+_test)(?:: ((?:[A-Z]\w+\.?[\w.]*(?:, )?)+))?", page):
            if program not in programs and not any(ROOT.glob(f"tests/faults/{program}.py")):
                found.append(program)
            for name in filter(None, re.split(r", ?", names)):
                named += 1
                if not any(case.startswith(name.rstrip(".")) for case in cases.get(program, ())):
                    found.append(f"{program}: {name}")
        self.assertGreater(named, 60)
        self.expect_none(found)

    def test_plots_are_those_of_the_tables(self):
        run = subprocess.run([sys.executable, ROOT / "tests/bench/plot_performance.py", "--check"], capture_output=True, text=True)
        self.assertEqual(0, run.returncode, run.stdout + run.stderr)


if __name__ == "__main__":
    unittest.main()
