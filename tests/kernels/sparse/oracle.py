#!/usr/bin/env python3
"""Records golden/selections.json, what each sparse method must choose, by plain NumPy in float64.

An independent definition: written from the papers and the contracts in kernels/sparse/*/, sharing
no code with them. Keys and queries are small multiples of 1/8, made by a hash that oracle_test.cc
repeats, so that every product and sum is exact in float32 and ties are true ties.

    python3 tests/kernels/sparse/oracle.py        (needs numpy; writes the files beside it)
"""
import json
import math
import pathlib

import numpy as np

PAGE = 64
MASK = (1 << 64) - 1
QUERY, KEY, VALUE = 1, 2, 3


def values(seed, side, positions, head, dim):
    """[positions, dim]: multiples of 1/8 in [-2, 2]."""
    u = np.uint64
    x = u((seed * 0x9E3779B97F4A7C15 + side * 0xBF58476D1CE4E5B9 + head * 0xD6E8FEB86659FD93) & MASK)
    with np.errstate(over="ignore"):
        x = x + np.asarray(positions, dtype=u)[:, None] * u(0x94D049BB133111EB)
        x = x + np.arange(dim, dtype=u)[None, :] * u(0xA0761D6478BD642F)
        x = (x ^ (x >> u(30))) * u(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> u(27))) * u(0x94D049BB133111EB)
    return (((x ^ (x >> u(31))) % u(33)).astype(np.float64) - 16) / 8


class Case:
    """One query block over one sequence, as oracle_test.cc builds it."""

    def __init__(self, name, selector, first, rows, sink, window, budget, *, seed=1, run=1, group=2,
                 options=None, specials=(), top_p=1, unrotated=False, layer=1):
        self.json = dict(name=name, selector=selector, options=options or {}, first=first, rows=rows,
                         sink=sink, window=window, budget=budget, seed=seed, run=run, group=group,
                         specials=[list(s) for s in specials], top_p=top_p, unrotated=unrotated,
                         layer=layer)
        self.__dict__.update(self.json)
        self.context = first + rows
        self.dim, self.kv_heads = 16, 2

    def keys(self, head):
        """[context, dim]; runs of `run` tokens are alike. A special puts a value into element 0."""
        keys = values(self.seed, KEY, np.arange(self.context) // self.run, head, self.dim)
        for position, x in self.specials:
            keys[position, 0] = float(x)
        return keys

    def queries(self, head):
        """[rows, group, dim]"""
        positions = np.arange(self.first, self.first + self.rows)
        return np.stack([values(self.seed, QUERY, positions, head * self.group + g, self.dim)
                         for g in range(self.group)], axis=1)

    def distant_queries(self, head):
        """The same where every key stands at position 0 and query r at window + r, if keys are un-rotated."""
        queries = self.queries(head)
        if not self.unrotated:
            return queries
        return np.stack([rotated(q, self.window + r) * SCALING for r, q in enumerate(queries)])

    def choosers(self, head):
        """The KV heads whose query heads choose together for this one."""
        return range(self.kv_heads) if self.options.get("scope") == "layer" else [head]

    def best(self, scores, count):
        return best(scores, count, near=3e-5 if self.unrotated else 1e-6)

    def ranges(self):
        """sink_end and window_begin; None under rule R2."""
        if self.context <= self.sink + self.window + self.budget:
            return None
        window_begin = max(0, self.first - self.window + 1)
        return min(self.sink, window_begin), window_begin


THETA, SCALING = 1e4, 1.1


def rotated(x, positions):
    """x [..., dim] at positions [...] or one for all, times SCALING."""
    half = x.shape[-1] // 2
    angles = np.multiply.outer(np.asarray(positions, dtype=np.float64), THETA ** (-np.arange(half) / half))
    c, s = np.cos(angles) * SCALING, np.sin(angles) * SCALING
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)


def logits(keys, query):
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.sum(keys * query, axis=1), nan=-math.inf, posinf=math.inf,
                             neginf=-math.inf)


def best(scores, count, near=1e-6):
    """Indices of the `count` largest, later ones first among equals."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], -j))
    if 0 < count < len(order):
        last, next_one = scores[order[count - 1]], scores[order[count]]
        if last != next_one:
            assert last - next_one > near * abs(last), "too close to call in float32: take another seed"
    return sorted(order[:count])


def page_score(case, query, keys):
    """The score by which `quest` ranks a page with these keys."""
    products = np.sort([query * keys.min(axis=0), query * keys.max(axis=0)], axis=0)
    return (products[1] + (0 if case.options.get("score") == "bound" else 0.5) * products[0]).sum()


def quest(case, head, begin, end):
    keys, queries = case.keys(head), case.distant_queries(head).reshape(-1, case.dim)
    first, last = begin // PAGE, -(-end // PAGE)
    scores = []
    for page in range(first, last):
        chunk = keys[page * PAGE:(page + 1) * PAGE]
        scores.append(max(page_score(case, q, chunk) for q in queries))
    pages = case.best(scores, min(-(-case.budget // PAGE), len(scores)))
    return {t for p in pages for t in range((first + p) * PAGE, (first + p + 1) * PAGE)}


def tokenselect(case, head, begin, end):
    votes = np.zeros(end - begin)
    for chooser in case.choosers(head):
        keys = case.keys(chooser)[begin:end]
        for query in case.distant_queries(chooser).mean(axis=0):
            s = logits(keys, query) / math.sqrt(len(query))
            if s.max() == -math.inf:
                continue
            with np.errstate(invalid="ignore"):
                below = np.where(s == s.max(), 0, s - s.max())
            weights = np.where(below >= -87, np.exp(below), 0)
            votes += weights / weights.sum()
    return {begin + j for j in case.best(votes, min(case.budget, end - begin))}


def hip(case, head, begin, end):
    block, n = 2, -(-case.budget // 2)
    blocks = -(-(end - begin) // block)
    if n >= blocks:
        return set(range(begin, end))
    keys, queries = case.keys(head), case.distant_queries(head)
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
        nodes = [halves[i] for i in case.best(scores, n)]
    return {t for start, _ in nodes
            for t in range(begin + start * block, min(begin + (start + 1) * block, end))}


def coded(keys):
    """The keys as 4-bit codes with a float16 scale and zero per key give them back."""
    low, high = keys.min(axis=1), keys.max(axis=1)
    zero = low.astype(np.float16).astype(np.float64)
    exact = (high - zero) / 15
    scale = exact.astype(np.float16)
    scale = np.where(scale.astype(np.float64) < exact, np.nextafter(scale, np.float16(np.inf)), scale)
    scale = scale.astype(np.float64)
    flat = high == low
    codes = np.clip(np.rint((keys - zero[:, None]) / np.where(flat, 1, scale)[:, None]), 0, 15)
    return np.where(flat[:, None], zero[:, None], codes * scale[:, None] + zero[:, None])


def infinitehip(case, head, begin, end, first_stage=0, left=None):
    """`left`, with reuse: the chunks that each stage leaves; stages before `first_stage` do not run."""
    left = {} if left is None else left
    preset, probe = case.options.get("preset", "3k"), case.options.get("probe", "digest")
    sizes = {"3k": (256, 32, 8), "5k": (64, 32, 16)}[preset[:2]]
    room = {"3k": (32768, 8192), "5k": (32768, 16384)}[preset[:2]]
    room = [max(k, case.budget) for k in room] + [case.budget]
    seen = case.window - max(sizes[0], 64)
    chunks = [c for c in range(begin, case.context, sizes[0]) if c <= case.first - seen]
    for stage, (size, kept, stride) in enumerate(zip(sizes, room, (4, 4, 1))):
        if stage < first_stage:
            continue
        if stage > 0:
            chunks = [c + at for c in left[stage - 1] for at in range(0, sizes[stage - 1], size)]
        count = -(-kept // size)
        left[stage] = chunks
        if len(chunks) <= count:
            continue
        scores = np.max([chunk_scores(case, chooser, chunks, size, stride, stage, probe, seen)
                         for chooser in case.choosers(head)], axis=0)
        left[stage] = [chunks[i] for i in case.best(scores, count)]
    return {t for c in left[2] for t in range(c, c + sizes[-1])}


def chunk_scores(case, head, chunks, size, stride, stage, probe, seen):
    """The scores of a stage's chunks by the query heads of one KV head."""
    keys, queries = case.keys(head), case.queries(head)
    codes = coded(keys) if probe == "digest" else None
    means = [queries[r:r + stride].mean(axis=0) for r in range(0, case.rows, stride)]

    def at(index):
        """The queries of each head beside a chunk: for left probes, and for everything else."""
        if not case.unrotated:
            distances = None, None
        elif case.layer < 3:
            distances = [len(chunks) - 1 + seen - index] * 2
        else:
            distances = seen + 1, seen
        return [[[mean[g] if d is None else rotated(mean[g], d) * SCALING for mean in means]
                 for g in range(case.group)] for d in distances]

    def best_logit(some_keys, heads):  # [heads, keys]: the best of the averaged rows
        return np.array([np.max([logits(some_keys, q) for q in rows], axis=0) for rows in heads])

    scores = []
    for index, c in enumerate(chunks):
        lefts, heads = at(index)
        if probe == "digest" and stage == 0:
            pages = range(c // PAGE, -(-(c + size) // PAGE))
            sides = [[f(keys[p * PAGE:(p + 1) * PAGE], axis=0) for f in (np.min, np.max)] for p in pages]
            scores.append(max(np.maximum(q * low, q * high).sum()
                              for low, high in sides for h in heads for q in h))
        elif probe == "digest":
            scores.append(best_logit(codes[c:c + size], heads).max())
        else:
            rows = [best_logit(keys[c:c + size], some) for some in (lefts, heads)]
            scores.append(max(descend(left_row, right_row, probe) for left_row, right_row in zip(*rows)))
    return scores


def descend(lefts, rights, probe):
    """The score of a chunk for one head, whose logits are `lefts` for left probes and `rights` for others."""
    left, right = 0, len(lefts)
    if probe == "centre" and right <= 8:
        return rights.max()
    found = -math.inf
    while right - left > 1:
        middle = (left + right) // 2
        a, b = (left, middle) if probe == "first" else ((left + middle) // 2, (middle + right) // 2)
        found = max(found, lefts[a], rights[b])
        left, right = (left, middle) if lefts[a] > rights[b] else (middle, right)
    return rights[left] if probe == "first" else found


def top_p(case, head, begin, end, tokens):
    """The chosen tokens that are left after pruning to a share `top_p` of the estimated mass."""
    keys, queries = coded(case.keys(head)), case.queries(head)[0]
    competing = np.array(sorted(t for t in tokens if begin <= t < end), dtype=int)
    mandatory = np.r_[0:begin, end:case.context]
    if case.unrotated:
        # Side by side: sink, all that was chosen, window.
        rank = {t: begin + i for i, t in enumerate(sorted(tokens))}
        places = np.zeros(case.context)
        places[:begin] = np.arange(begin)
        places[competing] = [rank[t] for t in competing]
        places[end:] = begin + len(tokens) + np.arange(case.context - end)
        keys, queries = rotated(keys, places), rotated(queries, places[-1])
    live = set()
    for query in queries:
        scaled = keys @ query / math.sqrt(case.dim)
        top = max(scaled[competing].max(initial=-math.inf), scaled[mandatory].max(initial=-math.inf))
        weights, held = np.exp(scaled[competing] - top), np.exp(scaled[mandatory] - top).sum()
        need = case.top_p * (1 - 1e-6) * (weights.sum() + held) - held
        assert abs(need) > 1e-4, "too close to call in float32: take another seed"
        kept = []
        if need <= 0:
            continue
        for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
            equal = kept and abs(weights[i] - weights[kept[-1]]) < 1e-12
            if weights[kept].sum() >= need and not equal:
                margin = weights[kept].sum() - need
                assert margin > 1e-5 and weights[kept[-1]] - weights[i] > 1e-6 * weights[i], "too close"
                break
            kept.append(i)
        live |= {int(competing[i]) for i in kept}
    return live


METHODS = dict(quest=quest, tokenselect=tokenselect, hip=hip, infinitehip=infinitehip)


def chosen(case):
    """For each KV head None (everything) or the chosen tokens, as [begin, end) ranges; with a
    pruner also those of them that it leaves (it counts only what lies between sink and window)."""
    ranges = case.ranges()
    if ranges is None:
        return dict(chosen=[None] * case.kv_heads)
    tokens = [METHODS[case.selector](case, head, *ranges) if ranges[0] < ranges[1] else set()
              for head in range(case.kv_heads)]
    result = dict(chosen=[runs(some) for some in tokens])
    if case.top_p < 1:
        result["live"] = [runs(top_p(case, head, *ranges, some)) for head, some in enumerate(tokens)]
    return result


def runs(tokens):
    found = []
    for t in sorted(tokens):
        if found and found[-1][1] == t:
            found[-1][1] = t + 1
        else:
            found.append([t, t + 1])
    return found


def cases():
    for selector in ("quest", "tokenselect", "hip"):
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
    for score in ("bound", "estimate"):
        by = dict(selector="quest", options=dict(score=score))
        yield Case("many pages", first=1700, rows=1, sink=70, window=130, budget=300, seed=14, **by)
        yield Case("many pages, a prompt's block", first=1664, rows=64, sink=33, window=90, budget=320, seed=15, group=4, **by)
        yield Case("many pages, ties", first=1650, rows=1, sink=10, window=77, budget=500, seed=16, run=130, **by)
        yield Case("many pages, un-rotated", first=1700, rows=1, sink=20, window=60, budget=300, seed=17, unrotated=True, **by)
    for selector in ("tokenselect", "hip"):
        yield Case("minus infinity and NaN", selector, 420, 1, 16, 64, 48, seed=12,
                   specials=[(100, "-inf"), (101, "-inf"), (200, "nan"), (300, "-inf")])
        yield Case("infinity", selector, 420, 1, 16, 64, 4, seed=13,
                   specials=[(p, "inf") for p in (90, 91, 180, 270, 271, 272, 273)])
    for share in (0.1, 0.5, 0.9, 0.99):
        yield Case("pruned pages", "quest", 900, 1, 20, 60, 400, seed=31, top_p=share)
        yield Case("pruned tokens", "tokenselect", 900, 1, 4, 30, 200, seed=32, top_p=share)
        yield Case("pruned, four heads", "quest", 700, 1, 0, 1, 500, seed=33, group=4, top_p=share)
        yield Case("pruned ties", "hip", 800, 1, 17, 33, 120, seed=34, run=7, top_p=share)
        yield Case("pruned, reaching into the window", "infinitehip", 1200, 1, 10, 140, 256, seed=35,
                   options=dict(preset="5k"), top_p=share)
    for preset in ("3k", "5k"):
        for probe in ("digest", "centre", "first"):
            hip3 = dict(selector="infinitehip", options=dict(preset=preset, probe=probe))
            yield Case("last stage only", first=3000, rows=1, sink=64, window=600, budget=256, seed=21,
                       **hip3)
            yield Case("two stages", first=18000, rows=1, sink=10, window=1024, budget=300, seed=22,
                       group=1, **hip3)
            yield Case("all stages", first=36000, rows=1, sink=256, window=600, budget=512, seed=23,
                       **hip3)
            yield Case("a prompt's block", first=17984, rows=64, sink=33, window=512, budget=256,
                       seed=24, **hip3)
            yield Case("rows of no whole four", first=2050, rows=7, sink=0, window=520, budget=100,
                       seed=25, group=3, **hip3)
            yield Case("ties of 50 tokens", first=4000, rows=1, sink=5, window=700, budget=333, seed=26,
                       run=50, **hip3)
            yield Case("all keys alike", first=3000, rows=1, sink=128, window=512, budget=160, seed=27,
                       run=10000, **hip3)
            yield Case("the least window, one chunk", first=645, rows=1, sink=130, window=512, budget=1,
                       seed=28, **hip3)
            yield Case("short context", first=1000, rows=1, sink=100, window=512, budget=389, seed=28,
                       **hip3)
    yield from layer_cases()
    yield from unrotated_cases()


def layer_cases():
    """All heads of the layer choose together."""
    layer = dict(scope="layer")
    for selector, window in (("tokenselect", 130), ("infinitehip", 600)):
        options = dict(layer, preset="5k") if selector == "infinitehip" else layer
        yield Case("layer, decode", selector, 1700, 1, 70, window, 200, seed=61, options=options)
        yield Case("layer, four heads", selector, 1640, 1, 64, window, 160, seed=62, group=4, options=options)
        yield Case("layer, a prompt's block", selector, 1664, 64, 33, window, 240, seed=63, options=options)
        yield Case("layer, ties", selector, 1650, 1, 10, window, 96, seed=64, run=50, options=options)
        yield Case("layer, pruned", selector, 1700, 1, 20, window, 400, seed=65, options=options, top_p=0.9)
        yield Case("layer, un-rotated", selector, 1700, 1, 20, window, 320, seed=66, options=options,
                   unrotated=True)
    for probe in ("centre", "first"):
        yield Case("layer, all stages", "infinitehip", 36000, 1, 256, 600, 512, seed=67,
                   options=dict(layer, probe=probe))


def unrotated_cases():
    """Keys that are cached un-rotated: what is chosen, and what is then pruned at compact positions."""
    raw = dict(unrotated=True)
    for selector in ("quest", "tokenselect", "hip"):
        yield Case("un-rotated, decode", selector, 700, 1, 70, 130, 100, seed=41, **raw)
        yield Case("un-rotated, four heads", selector, 640, 1, 64, 65, 64, seed=42, group=4, **raw)
        yield Case("un-rotated, a prompt's block", selector, 640, 64, 33, 90, 120, seed=43, **raw)
        yield Case("un-rotated, all keys alike", selector, 450, 1, 10, 50, 66, seed=44, run=1000, **raw)
        yield Case("un-rotated, short context", selector, 399, 1, 20, 80, 300, seed=10, **raw)
    for share in (0.5, 0.9):
        yield Case("un-rotated, pruned pages", "quest", 900, 1, 20, 60, 400, seed=45, top_p=share, **raw)
        yield Case("un-rotated, pruned tokens", "tokenselect", 900, 1, 4, 30, 200, seed=46, top_p=share, **raw)
        yield Case("un-rotated, pruned, reaching into the window", "infinitehip", 1200, 1, 10, 140, 256, seed=47,
                   options=dict(preset="5k"), top_p=share, **raw)
    for layer in (2, 3):  # chunk-indexed, relative
        for preset in ("3k", "5k"):
            for probe in ("digest", "centre", "first"):
                hip3 = dict(selector="infinitehip", options=dict(preset=preset, probe=probe), layer=layer, **raw)
                yield Case("un-rotated, last stage", first=3000, rows=1, sink=64, window=600, budget=256, seed=51, **hip3)
                yield Case("un-rotated, all stages", first=36000, rows=1, sink=256, window=600, budget=512, seed=52, **hip3)
                yield Case("un-rotated, seven rows", first=2050, rows=7, sink=0, window=520, budget=100, seed=53, group=3,
                           **hip3)


def write(name, found):
    path = pathlib.Path(__file__).parent / "golden" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in found) + "\n]\n")
    print(f"{len(found)} cases in {path}")


def main():
    write("selections.json", [dict(case.json, **chosen(case)) for case in cases()])


if __name__ == "__main__":
    main()
