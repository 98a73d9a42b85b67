"""The harness on documents so small that it takes a minute: does it work, and do policies still find what they should?

Asks needle-8k, which answers dense, and holds a few answers and masses against thresholds that a broken selector, pruner or
count misses. Returns the number of things that are not as they should be.
"""

import math
import tempfile
from types import SimpleNamespace

import answers
import fidelity
import report
from policies import select
from results import Results

MODEL = "needle-8k"
LENGTH, SINK, WINDOW, BUDGET = 4000, 64, 512, 512
SEED = 1
# Policies that keep the answers, with the least share of blocks that they skip (single tokens lie in many blocks).
FINDS = {"quest": 0.6, "tokenselect": 0.001, "infinitehip": 0.3, "quest+top_p": 0.6}
FORGETS = "streaming"
COMPARED = ("all", "quest", "tokenselect", "infinitehip", "infinitehip+top_p")


class Checks:
    def __init__(self):
        self.failed = 0

    def expect(self, holds, what):
        print(("ok      " if holds else "FAILED  ") + what, flush=True)
        self.failed += not holds


def check_answers(results, checks):
    cells = {key[0]: cell for key, cell in report.sum_answers(results).items()}
    for name, cell in cells.items():
        skipped = sum(cell.get(reason, 0) for reason in ("selected_out", "window", "pruned")) / cell["blocks_total"]
        got = f"{name}: {cell['exact']:.0f} of {cell['asked']:.0f} answers exact, {skipped:.2f} of the blocks skipped"
        if name == "all":
            checks.expect(cell["exact"] == cell["asked"] and skipped == 0, f"{got}; all and none expected")
        elif name == FORGETS:
            checks.expect(cell["exact"] <= 3 and skipped > 0.5, f"{got}; at most 3, for the facts lie outside of its window")
        else:
            checks.expect(cell["exact"] >= cell["asked"] - 1 and skipped >= FINDS[name],
                          f"{got}; at least {cell['asked'] - 1:.0f} and {FINDS[name]}")
        checks.expect(name == "all" or cell["mass_samples"] > 0, f"{name}: {cell['mass_samples']:.0f} masses measured")
    checks.expect(cells["quest+top_p"].get("pruned", 0) > 0, "quest+top_p: blocks were pruned")
    checks.expect(set(cells) == {"all", FORGETS, *FINDS}, f"{len(cells)} policies answered")


def mean(values):
    return sum(values) / len(values)


def check_fidelity(results, checks):
    cells = {key[0]: cell for key, cell in report.sum_fidelity(results).items()}
    checks.expect(min(cells["all"]["right"]) == 1, "the model chooses every token of its answers itself")
    checks.expect(min(cells["all"]["mass"]) > 0.9999 and max(cells["all"]["error"]) < 1e-4, "all: keeps everything")
    for name, cell in cells.items():
        checks.expect(all(kept <= oracle + 1e-4 for kept, oracle in zip(cell["mass"], cell["oracle"])),
                      f"{name}: no selection keeps more than the heaviest keys")
    ratio = {name: mean(cell["mass"]) / mean(cell["oracle"]) for name, cell in cells.items()}
    checks.expect(ratio["tokenselect"] >= 0.95, f"tokenselect: {ratio['tokenselect']:.3f} of the oracle's mass, 0.95 expected")
    checks.expect(ratio["infinitehip"] >= 0.78, f"infinitehip: {ratio['infinitehip']:.3f} of the oracle's mass, 0.78 expected")
    by_head = {}
    for layer, head, selected in cells["infinitehip+top_p"]["by_head"]:
        by_head.setdefault((layer, head), []).extend(selected)
    budgets = sorted(mean(selected) for selected in by_head.values())
    checks.expect(budgets[-1] > 4 * max(1, budgets[0]), f"budgets of heads differ: {budgets[0]:.1f} to {budgets[-1]:.1f} tokens")


def check_facts(results, checks):
    (facts,) = results.records("facts")
    bits = {name: kept["mass"] for name, kept in facts["bits"].items()}
    checks.expect(bits["4"] >= facts["top_p"] - 0.02 > bits["2"] + 0.02,
                  f"for top_p {facts['top_p']} 4 bits keep {bits['4']:.3f}, 2 bits {bits['2']:.3f}")
    for scope, ways in facts["votes"].items():
        soft, summed = ways["soft vote"]["mass"], ways["summed logits"]["mass"]
        checks.expect(soft > summed, f"votes by {scope}: soft {soft:.3f}, summed logits {summed:.3f}")
    overlap = facts["overlap"]
    chance = BUDGET / LENGTH
    checks.expect(chance < overlap["previous"] <= overlap["earlier"] <= 1,
                  f"of the heaviest pages {overlap['previous']:.2f} were so the step before, {overlap['earlier']:.2f} at any")
    histogram = facts["occupancy"]["context / 64"]
    chunks = sum(histogram)
    empty, heavy = histogram[0] / chunks, sum(held * count for held, count in enumerate(histogram)) / chunks
    checks.expect(empty > 1.3 * math.exp(-heavy), f"{empty:.2f} of the chunks hold none of the heaviest 64th of the keys; "
                  f"by chance {math.exp(-heavy):.2f} would")


def run():
    names = ["all", FORGETS, *FINDS]
    arguments = SimpleNamespace(model=MODEL, policies=names, tasks=["multi_key"], lengths=[LENGTH], budgets=[BUDGET],
                                sink_tokens=SINK, window_tokens=WINDOW, answers=8, streams=4, seed=SEED,
                                flags="--mass-sample-rate=0.1")
    checks = Checks()
    with tempfile.TemporaryDirectory(prefix="kvasir-quality-") as folder:
        results = Results(folder)
        answers.run(arguments, results)
        fidelity.run_document(MODEL, select(COMPARED, SINK, WINDOW, [BUDGET]), (LENGTH, SEED, 1), results)
        check_answers(results, checks)
        check_fidelity(results, checks)
        check_facts(results, checks)
        asked = len(list(results.records("answers")))
        answers.run(arguments, Results(folder))
        checks.expect(len(list(Results(folder).records("answers"))) == asked, "what was found is not asked again")
    return min(checks.failed, 1)
