"""The output of attention at grouped positions (SelfExtend, arXiv 2401.01325), after the selectors of
oracle.py, in NumPy and float64. Writes golden/grouped.json, which grouped_oracle_test.cc replays.

An independent definition: nothing is rotated here. A logit depends only on the distance d at which query
and key are seen, and is computed from it: with x = x1 + i x2 for the two halves of a vector and f the
frequencies, Re(q conj(k) exp(i d f)), summed.

    python3 tests/kernels/sparse/grouped_oracle.py        (needs numpy)
"""
import math

import numpy as np

from oracle import METHODS, SCALING, THETA, VALUE, Case, values, write


class Grouped(Case):
    """Groups of `group_size` tokens beyond a neighbourhood of `near`."""

    def __init__(self, name, selector, first, rows, group_size, near, *, sink=0, window=1, budget=1, **more):
        super().__init__(name, selector, first, rows, sink, window, budget, unrotated=True, **more)
        more = dict(group_size=group_size, near=near)
        self.json.update(more)
        self.__dict__.update(more)
        self.dim = 64

    def values(self, head):
        return values(self.seed, VALUE, np.arange(self.context), head, self.dim)

    def attended(self, head, position):
        """The tokens that the query at `position` attends to, ascending."""
        ranges = self.ranges()
        if self.selector == "all" or ranges is None:
            return np.arange(position + 1)
        sink, window = np.arange(ranges[0]), np.arange(ranges[1], position + 1)
        between = METHODS[self.selector](self, head, *ranges) if self.selector != "streaming" else ()
        return np.union1d(np.r_[sink, window], sorted(between)).astype(int)

    def distances(self, position, tokens):
        g, w = self.group_size, self.near
        own = position - tokens
        by_groups = position // g + w - w // g - tokens // g
        return np.where(own < w, own, by_groups)

    def out(self, head):
        """[rows, group, dim]"""
        keys, kv, queries = self.keys(head), self.values(head), self.queries(head)
        return np.array([[self.attention(q, self.first + r, keys, kv, head) for q in queries[r]]
                         for r in range(self.rows)])

    def attention(self, query, position, keys, kv, head):
        tokens = self.attended(head, position)
        half = self.dim // 2
        q = query[:half] + 1j * query[half:]
        k = keys[tokens, :half] + 1j * keys[tokens, half:]
        angles = np.multiply.outer(self.distances(position, tokens), THETA ** (-np.arange(half) / half))
        logits = (q * k.conj() * np.exp(1j * angles)).real.sum(axis=1) * SCALING**2 / math.sqrt(self.dim)
        weights = np.exp(logits - logits.max())
        return weights @ kv[tokens] / weights.sum()


def cases():
    # Where the first far key lies in the query's page, in another, at the begin of one.
    for group_size, near in ((2, 1), (3, 10), (8, 64), (8, 100), (7, 333), (64, 128)):
        yield Grouped("decode", "all", 700, 1, group_size, near, seed=71)
        yield Grouped("rows of a prompt", "all", 450, 5, group_size, near, seed=72)
    yield Grouped("groups longer than the neighbourhood", "all", 900, 1, 512, 100, seed=73)
    yield Grouped("the neighbourhood ends in the block", "all", 64, 9, 4, 68, seed=74)
    yield Grouped("all are near", "all", 300, 3, 4, 303, seed=75)
    yield Grouped("all but one are near", "all", 300, 1, 4, 300, seed=76)
    yield Grouped("a long context", "all", 9000, 1, 16, 500, seed=77)
    for selector, window in (("streaming", 130), ("quest", 130), ("tokenselect", 130), ("hip", 130),
                             ("infinitehip", 600)):
        lists = dict(sink=70, window=window, budget=200, seed=78)
        yield Grouped("decode", selector, 1700, 1, 8, 100, **lists)
        yield Grouped("four heads", selector, 1664, 1, 4, 640, group=4, **lists)
        yield Grouped("rows of a prompt", selector, 1670, 5, 5, 90, **lists)
        yield Grouped("short context", selector, 800, 1, 8, 100, sink=70, window=window, budget=600, seed=79)


def main():
    write("grouped.json", [dict(case.json, out=[case.out(head).round(5).tolist() for head in range(case.kv_heads)])
                           for case in cases()])


if __name__ == "__main__":
    main()
