#!/usr/bin/env python3
"""Records golden/selections.json: what each sparse method must choose, by plain NumPy in float64.

An independent definition: written from the papers and the contracts in kernels/sparse/*/, sharing
no code with them. Keys and queries are small multiples of 1/8, made by a hash that oracle_test.cc
repeats, so that every product and sum is exact in float32 and ties are true ties.

    python3 tests/kernels/sparse/oracle.py        (needs numpy; writes the file beside it)
"""
import json
import math
import pathlib

import numpy as np

PAGE = 64
MASK = (1 << 64) - 1
QUERY, KEY = 1, 2


def value(seed, side, position, head, i):
    """A multiple of 1/8 in [-2, 2]."""
    x = seed * 0x9E3779B97F4A7C15 + side * 0xBF58476D1CE4E5B9 + position * 0x94D049BB133111EB
    x = (x + head * 0xD6E8FEB86659FD93 + i * 0xA0761D6478BD642F) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return ((x ^ (x >> 31)) % 33 - 16) / 8


class Case:
    """One query block over one sequence, as oracle_test.cc builds it."""

    def __init__(self, name, selector, first, rows, sink, window, budget, *, seed=1, run=1, group=2,
                 options=None, specials=()):
        self.json = dict(name=name, selector=selector, options=options or {}, first=first, rows=rows,
                         sink=sink, window=window, budget=budget, seed=seed, run=run, group=group,
                         specials=[list(s) for s in specials])
        self.__dict__.update(self.json)
        self.context = first + rows
        self.dim, self.kv_heads = 16, 2

    def keys(self, head):
        """[context, dim]; runs of `run` tokens are alike. A special puts a value into element 0."""
        keys = np.array([[value(self.seed, KEY, t // self.run, head, i) for i in range(self.dim)]
                         for t in range(self.context)])
        for position, x in self.specials:
            keys[position, 0] = float(x)
        return keys

    def queries(self, head):
        """[rows, group, dim]"""
        return np.array([[[value(self.seed, QUERY, self.first + r, head * self.group + g, i)
                           for i in range(self.dim)] for g in range(self.group)]
                         for r in range(self.rows)])

    def ranges(self):
        """sink_end and window_begin; None under rule R2."""
        if self.context <= self.sink + self.window + self.budget:
            return None
        window_begin = max(0, self.first - self.window + 1)
        return min(self.sink, window_begin), window_begin


def logits(keys, query):
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.array([sum(a * b for a, b in zip(key, query)) for key in keys]),
                             nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def best(scores, count, near=1e-6):
    """Indices of the `count` largest, later ones first among equals."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], -j))
    if 0 < count < len(order):
        last, next_one = scores[order[count - 1]], scores[order[count]]
        if last != next_one:
            assert last - next_one > near * abs(last), "too close to call in float32: take another seed"
    return sorted(order[:count])


def quest(case, head, begin, end):
    keys, queries = case.keys(head), case.queries(head).reshape(-1, case.dim)
    first, last = begin // PAGE, -(-end // PAGE)
    scores = []
    for page in range(first, last):
        chunk = keys[page * PAGE:(page + 1) * PAGE]
        low, high = chunk.min(axis=0), chunk.max(axis=0)
        scores.append(max(np.maximum(q * low, q * high).sum() for q in queries))
    pages = best(scores, min(-(-case.budget // PAGE), len(scores)))
    return {t for p in pages for t in range((first + p) * PAGE, (first + p + 1) * PAGE)}


def tokenselect(case, head, begin, end):
    keys = case.keys(head)[begin:end]
    mean = case.queries(head).mean(axis=0)
    votes = np.zeros(end - begin)
    for query in mean:
        s = logits(keys, query)
        if s.max() == -math.inf:
            continue
        with np.errstate(invalid="ignore"):
            below = np.where(s == s.max(), 0, s - s.max())
        weights = np.where(below >= -87, np.exp(below), 0)
        votes += weights / weights.sum()
    return {begin + j for j in best(votes, min(case.budget, end - begin))}


def hip(case, head, begin, end):
    block, n = 2, -(-case.budget // 2)
    blocks = -(-(end - begin) // block)
    if n >= blocks:
        return set(range(begin, end))
    keys, queries = case.keys(head), case.queries(head)
    sampled = sorted({min(r + 1, case.rows - 1) for r in range(0, case.rows, 2)})

    def score(start, length):
        centre = begin + (start + length // 2) * block
        tokens = keys[centre:min(centre + block, end)]
        return max(logits(tokens, queries[r, g]).max() for r in sampled for g in range(case.group))

    starts = [(2 * j * blocks + n) // (2 * n) for j in range(n + 1)]
    nodes = [(a, b - a) for a, b in zip(starts, starts[1:])]
    while max(length for _, length in nodes) > 1:
        halves = []
        for start, length in nodes:
            left = length // 2
            halves += [(start, left)] * (left > 0) + [(start + left, length - left)]
        scores = [score(*half) for half in halves]
        nodes = [halves[i] for i in best(scores, n)]
    return {t for start, _ in nodes
            for t in range(begin + start * block, min(begin + (start + 1) * block, end))}


METHODS = dict(quest=quest, tokenselect=tokenselect, hip=hip)


def chosen(case):
    """For each KV head None (everything) or the chosen tokens, as [begin, end) ranges."""
    ranges = case.ranges()
    if ranges is None:
        return [None] * case.kv_heads
    result = []
    for head in range(case.kv_heads):
        tokens = sorted(METHODS[case.selector](case, head, *ranges)) if ranges[0] < ranges[1] else []
        runs = []
        for t in tokens:
            if runs and runs[-1][1] == t:
                runs[-1][1] = t + 1
            else:
                runs.append([t, t + 1])
        result.append(runs)
    return result


def cases():
    for selector in METHODS:
        yield Case("decode", selector, 700, 1, 70, 130, 100)
        yield Case("decode, four heads", selector, 640, 1, 64, 65, 64, seed=2, group=4)
        yield Case("one head", selector, 511, 1, 0, 1, 37, seed=3, group=1)
        yield Case("one token", selector, 500, 1, 3, 100, 1, seed=4)
        yield Case("odd edges", selector, 577, 1, 61, 129, 130, seed=5)
        yield Case("ties of three tokens", selector, 600, 1, 32, 77, 90, seed=6, run=3)
        yield Case("all keys alike", selector, 450, 1, 10, 50, 66, seed=7, run=1000)
        yield Case("a prompt's block", selector, 640, 64, 33, 90, 120, seed=8)
        yield Case("five rows", selector, 655, 5, 16, 200, 80, seed=9, group=3)
        yield Case("budget of all but one", selector, 400, 1, 20, 80, 300, seed=10)
        yield Case("short context", selector, 399, 1, 20, 80, 300, seed=10)
        yield Case("no candidates", selector, 300, 1, 200, 250, 1000, seed=11)
    for selector in ("tokenselect", "hip"):
        yield Case("minus infinity and NaN", selector, 420, 1, 16, 64, 48, seed=12,
                   specials=[(100, "-inf"), (101, "-inf"), (200, "nan"), (300, "-inf")])
        yield Case("infinity", selector, 420, 1, 16, 64, 4, seed=13,
                   specials=[(p, "inf") for p in (90, 91, 180, 270, 271, 272, 273)])


def main():
    found = [dict(case.json, chosen=chosen(case)) for case in cases()]
    path = pathlib.Path(__file__).parent / "golden" / "selections.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in found) + "\n]\n")
    print(f"{len(found)} cases in {path}")


if __name__ == "__main__":
    main()
