#!/usr/bin/env python3
"""Records golden/terminations.json, what attention that ends early must leave unread and give out: by
plain NumPy in float64, from the definition of art and the selectors of oracle.py.

    python3 tests/kernels/sparse/art_oracle.py        (needs numpy; writes the file beside it)
"""
import math

import numpy as np

from oracle import METHODS, PAGE, VALUE, Case, page_score, top_p, values, write


class Termination(Case):
    """One query whose row may end early. Tokens of a peak have `x` as element 0 of their keys, so that
    head g's logits of them are higher by about peak_q[g] x / 8; those of `dull` have values of 0."""

    def __init__(self, name, first, sink, window, *, selector="all", budget=0, art=None, patience=5,
                 peaks=(), peak_q=(16, 16), dull=(), **more):
        super().__init__(name, selector, first, 1, sink, window, budget, group=len(peak_q), **more)
        more = dict(art=art or {}, patience=patience, peaks=[list(p) for p in peaks],
                    peak_q=list(peak_q), dull=[list(d) for d in dull])
        self.json.update(more)
        self.__dict__.update(more)
        self.dim = 64

    def keys(self, head):
        keys = super().keys(head)
        keys[:, 0] = 0
        for begin, end, x in self.peaks:
            keys[begin:end, 0] = x
        return keys

    def queries(self, head):
        queries = super().queries(head)
        queries[0, :, 0] = self.peak_q
        return queries

    def values(self, head):
        found = values(self.seed, VALUE, np.arange(self.context), head, self.dim)
        for begin, end in self.dull:
            found[begin:end] = 0
        return found

    def attended(self, head):
        """The tokens that attention may read."""
        ranges = self.ranges()
        if self.selector == "all" or ranges is None:
            return set(range(self.context))
        between = METHODS[self.selector](self, head, *ranges)
        if self.top_p < 1:
            between = top_p(self, head, *ranges, between)
        return set(range(ranges[0])) | set(range(ranges[1], self.context)) | between


def page_scores(case, head, pages):
    """The best score of the group for each page."""
    keys = case.keys(head)
    return {p: max(page_score(case, q, keys[p * PAGE:(p + 1) * PAGE]) for q in case.queries(head)[0])
            for p in pages}


def clearly(value, limit):
    """Whether value < limit, where float32 must find the same."""
    assert not 0.7 * limit < value < 1.4 * limit, "too close to call in float32: take another seed"
    return value < limit


class Art:
    """One head's queries of a case, under the options of art."""

    def __init__(self, case, head):
        self.case = case
        self.options = dict(dict(probe="normalised", guard="bounds", order="recency", scale="absolute",
                                 scale_tolerance=1e-5, direction_tolerance=1e-3, mass_tolerance=1e-5,
                                 unread_mass=1e-3), **case.art)
        self.keys, self.values, self.queries = case.keys(head), case.values(head), case.queries(head)[0]
        self.scaled = self.keys @ self.queries.T / math.sqrt(case.dim)  # [context, group]
        self.tokens = {}  # attended to, by page
        for t in sorted(case.attended(head)):
            self.tokens.setdefault(t // PAGE, []).append(t)
        begin, end = case.ranges() or (0, 0)
        pages = [p for p in sorted(self.tokens, reverse=True) if p > 0]
        self.window = [p for p in pages if (p + 1) * PAGE > end]
        self.between = [p for p in pages if (p + 1) * PAGE <= end and p * PAGE >= begin]
        self.sink = [p for p in pages if p not in self.window + self.between]
        if self.options["order"] == "importance":
            scores = page_scores(case, head, self.between)
            self.between.sort(key=lambda p: (-scores[p], -p))

    def read(self, pages, g):
        """Maximum, sum of weights and weighted sum of values over the pages."""
        some = [t for p in pages for t in self.tokens[p]]
        top = self.scaled[some, g].max()
        weights = np.exp(self.scaled[some, g] - top)
        return top, weights.sum(), weights @ self.values[some]

    def bound(self, page, g):
        chunk = self.keys[page * PAGE:(page + 1) * PAGE]
        query = self.queries[g]
        return np.maximum(query * chunk.min(axis=0), query * chunk.max(axis=0)).sum() / 8

    def calm(self, before, after):
        options = self.options
        (m0, l0, a0), (m1, l1, a1) = before, after
        watched = [d for d in range(self.case.dim) if d % 8 < 2]
        x0, x1 = a0[watched], a1[watched]
        if options["probe"] == "normalised":
            x0, x1 = x0 / l0, x1 / l1
        unit = np.linalg.norm(x1) if options["scale"] == "relative" else 1
        tests = [(np.linalg.norm(x1 - x0), options["scale_tolerance"] * unit),
                 (1 - x0 @ x1 / (np.linalg.norm(x0) * np.linalg.norm(x1)),
                  options["direction_tolerance"])]
        if options["probe"] == "normalised":
            tests.append((1 - l0 * math.exp(m0 - m1) / l1, options["mass_tolerance"]))
        if any(value > 1.4 * limit for value, limit in tests):
            return False
        return all([clearly(*test) for test in tests])

    def small(self, rest, g, seen):
        top, mass, _ = seen
        unread = sum(len(self.tokens[p]) * math.exp(self.bound(p, g) - top) for p in rest) / mass
        return clearly(unread, self.options["unread_mass"])


def art(case, head):
    """The pages left unread, and the output of each query head."""
    row = Art(case, head)
    group = range(len(row.queries))
    done = [0] if 0 in row.tokens else []
    steps, unread = row.window + row.between, []
    counts, before = [0 for _ in group], None
    if len(steps) >= case.patience + 3 and case.ranges() is not None:
        for i, page in enumerate(steps):
            done.append(page)
            after = [row.read(done, g) for g in group]
            for g in group:
                is_calm = before is not None and row.calm(before[g], after[g])
                counts[g] = counts[g] + 1 if is_calm else 0
            before = after
            rest = steps[i + 1:]
            if i + 1 < len(row.window) or not rest or min(counts) < case.patience:
                continue
            if row.options["guard"] == "none" or all(row.small(rest, g, after[g]) for g in group):
                unread = rest
                break
    else:
        done += steps
    done += row.sink
    out = [row.read(done, g) for g in group]
    return sorted(unread), [[round(x, 6) for x in (acc / mass).tolist()] for _, mass, acc in out]


def terminations():
    local = dict(first=2879, sink=40, window=130, peaks=[(2500, 2880, 16)], seed=41)
    far = dict(local, peaks=[(700, 701, 20), (2500, 2880, 16)])
    yield Termination("settles and the rest is small", **local)
    yield Termination("nothing settles", **dict(local, peaks=()))
    yield Termination("a far needle holds it back", **far)
    yield Termination("a far needle is missed without the guard", art=dict(guard="none"), **far)
    yield Termination("patience of one", patience=1, **local)
    yield Termination("patience of twelve", patience=12, **local)
    newest = dict(local, peaks=[(2860, 2880, 16)], art=dict(guard="none"))
    yield Termination("three pages more than patience", patience=41, **newest)
    yield Termination("one page too few", patience=42, **newest)
    yield Termination("relative scale", art=dict(scale="relative"), **local)
    yield Termination("loose tolerances", art=dict(scale_tolerance=0.02, direction_tolerance=0.01,
                      mass_tolerance=0.02, guard="none"), **dict(local, peaks=[(2500, 2880, 4)]))
    yield Termination("another head has not settled", **dict(local, peak_q=(16, 0)))
    yield Termination("the first head has not settled", art=dict(guard="none"),
                      **dict(local, peak_q=(0, 16)))
    yield Termination("the mass alone goes on", art=dict(scale_tolerance=1, direction_tolerance=1,
                      guard="none"), **dict(local, peaks=()))
    yield Termination("four heads", **dict(local, peak_q=(16, 15, 14, 16)))
    yield Termination("one head", **dict(local, peak_q=(16,)))
    yield Termination("a wide window", **dict(local, window=900))
    yield Termination("a long sink is read to its end", **dict(local, sink=300))
    yield Termination("no sink", **dict(local, sink=0))
    dull = dict(local, peaks=[(600, 2880, 16)], dull=[(600, 2600)])
    yield Termination("raw probe, values of zero", art=dict(probe="raw", guard="none"), **dull)
    yield Termination("normalised probe, values of zero", art=dict(guard="none"), **dull)
    yield Termination("raw probe", art=dict(probe="raw"), **local)
    lists = dict(local, first=5000, peaks=[(4500, 5001, 16)], budget=2000)
    yield Termination("with quest", selector="quest", **lists)
    yield Termination("best score first", selector="quest", art=dict(order="importance"),
                      **dict(lists, peaks=[(1000, 1030, 18), (4900, 5001, 16)]))
    yield Termination("best score first, no guard", selector="quest",
                      art=dict(order="importance", guard="none"),
                      **dict(lists, peaks=[(1000, 1030, 18), (4900, 5001, 16)]))
    yield Termination("with tokenselect", selector="tokenselect", **lists)
    yield Termination("with hip", selector="hip", **lists)
    loose = dict(scale_tolerance=0.05, direction_tolerance=0.05, mass_tolerance=0.01, guard="none")
    yield Termination("with quest and top_p", selector="quest", art=loose,
                      **dict(lists, peaks=[(2000, 4500, 12), (4500, 5001, 16)], top_p=0.9995, seed=42))
    yield Termination("short context", selector="quest", **dict(lists, budget=4900))


def terminated(case):
    found = [art(case, head) for head in range(case.kv_heads)]
    return dict(unread=[pages for pages, _ in found], out=[out for _, out in found])


if __name__ == "__main__":
    write("terminations.json", [dict(case.json, **terminated(case)) for case in terminations()])
