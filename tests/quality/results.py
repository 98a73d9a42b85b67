"""What runs of the harness have found: JSON lines in a folder, one a (policy, document).

A line found there is not computed again, so a run that was stopped goes on where it was, and folders are merged by copying
their files into one. What was found for a policy that is now another one is left out.
"""

import json
import math
import pathlib
from typing import Dict, Iterator, Tuple


def wilson(successes: float, trials: int, z: float = 1.96) -> Tuple[float, float]:
    """95 % interval of a proportion."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def key_of(record: Dict) -> Tuple:
    """Of one policy's turn at one document; `kind` is answers, fidelity or facts."""
    return tuple(record.get(name) for name in ("kind", "model", "task", "length", "seed", "questions", "policy", "spec"))


class Results:
    """Lines by key. With a folder they are read from, and written to, files in it."""

    def __init__(self, folder=None):
        self._folder = pathlib.Path(folder) if folder else None
        self._records: Dict[Tuple, Dict] = {}
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self._folder.glob("*.jsonl")):
                for line in path.read_text().splitlines():
                    record = json.loads(line)
                    self._records[key_of(record)] = record

    def __contains__(self, record: Dict) -> bool:
        return key_of(record) in self._records

    def add(self, record: Dict) -> None:
        self._records[key_of(record)] = record
        if self._folder is not None:
            with open(self._folder / f"{record['kind']}.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")

    def records(self, kind: str) -> Iterator[Dict]:
        return (record for record in self._records.values() if record["kind"] == kind)
