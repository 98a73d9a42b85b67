"""The end of deploy/quickstart.sh: one document beyond the trained window, asked with dense and with sparse attention.
The servers have the flags of the script; the document is shorter than the script's, which takes a minute to read."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from dataclasses import asdict

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from support.service import ROOT, Service  # noqa: E402

from documents import make_document  # noqa: E402

TOKENS, TRAINED = 14000, 8192


def flags_of_script(name):
    script = (ROOT / "deploy" / "quickstart.sh").read_text()
    return re.search(rf"^{name}_flags=\(([^)]*)\)", script, re.MULTILINE).group(1).split()


class SideBySide(unittest.TestCase):
    def test_sparse_answers_where_dense_does_not(self):
        document = asdict(make_document("multi_key", TOKENS, 3, 1))
        with tempfile.TemporaryDirectory() as folder, Service(flags=flags_of_script("dense")) as dense, \
                Service(flags=flags_of_script("sparse")) as sparse:
            path = pathlib.Path(folder) / "document.json"
            path.write_text(json.dumps(document))
            ran = self.side_by_side(path, f"dense={dense.http_address}", f"sparse={sparse.http_address}")
            self.assertEqual(ran.returncode, 0, ran.stderr)
            *rows, summary = ran.stdout.splitlines()[1:]
            for row, question in zip(rows, document["questions"], strict=True):
                asked, dense_cells, sparse_cells = row.split(" | ")
                expected = question["answer"].strip().rstrip(".")
                self.assertTrue(asked.rstrip().endswith(expected), row)
                self.assertNotIn(expected, dense_cells)
                self.assertTrue(sparse_cells.strip().startswith(expected), row)
                self.assertEqual(self.percent(dense_cells), 100)
                self.assertLess(self.percent(sparse_cells), 50)
                self.assertGreater(self.percent(sparse_cells), 0)
            tokens, dense_exact, sparse_exact = map(int, re.fullmatch(
                r"(\d+) tokens a prompt; exact answers: dense (\d) of 3, sparse (\d) of 3", summary).groups())
            self.assertGreater(tokens, TRAINED)
            self.assertEqual((dense_exact, sparse_exact), (0, 3))
            # The last server is the one whose answers must be right.
            swapped = self.side_by_side(path, f"sparse={sparse.http_address}", f"dense={dense.http_address}")
            self.assertEqual(swapped.returncode, 1, swapped.stderr)

    @staticmethod
    def percent(cells):
        return int(re.search(r"(\d+)% ", cells).group(1))

    @staticmethod
    def side_by_side(*arguments):
        return subprocess.run([sys.executable, ROOT / "deploy" / "side_by_side.py", *arguments], capture_output=True,
                              text=True, timeout=600, check=False)


if __name__ == "__main__":
    unittest.main(verbosity=2)
