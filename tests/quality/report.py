"""Tables and plots of what the harness found, printed or written into docs/quality.md.

There, what stands between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced; all else is written by hand.
"""

import json
import re
import statistics
from collections import defaultdict

import plot
from policies import MIN_MASS, POLICIES
from results import wilson
from support.service import ROOT

DOCUMENT = ROOT / "docs" / "quality.md"
PLOTS = ROOT / "docs" / "quality"
# ContractOutcome of kernels/sparse/quality/quality_contract.h.
OUTCOMES = {0: "none", 1: "kept", 2: "dense", 3: "widened", 4: "missed"}


def in_order(cells):
    """By policy as in policies.py, then by what else is in the key; what is no policy any more is left out."""
    places = {name: place for place, name in enumerate(POLICIES)}
    return sorted((key for key in cells if key[0] in places), key=lambda key: (places[key[0]], key[1:]))


def table(header, rows):
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)])


def sum_answers(results):
    """{(policy, budget, model, task, length, window): sums over documents}."""
    cells = defaultdict(lambda: defaultdict(float))
    for record in results.records("answers"):
        window = json.loads(record["spec"])[0]["decode"].get("window_tokens", 0)
        cell = cells[(record["policy"], record["budget"], record["model"], record["task"], record["length"], window)]
        attention = record["attention"]
        lowest = min(cell.get("mass_minimum", 1.0), attention["mass_minimum"])
        for name in ("asked", "exact", "tokens", "seconds"):
            cell[name] += record[name]
        for name, value in attention.items():
            cell[name] += value
        cell["mass_minimum"] = lowest
    return cells


def skipped_share(cell):
    reasons = {name: cell[name] for name in ("selected_out", "window", "pruned", "terminated") if cell.get(name)}
    total = max(1, cell["blocks_total"])
    share = f"{100 * sum(reasons.values()) / total:.1f} %"
    return share if len(reasons) < 2 else share + " (" + ", ".join(
        f"{name} {100 * value / total:.1f}" for name, value in reasons.items()) + ")"


def answers_table(results):
    cells = sum_answers(results)
    rows = []
    for key in in_order(cells):
        policy, budget, model, task, length, window = key
        cell = cells[key]
        low, high = wilson(cell["exact"], cell["asked"])
        mass = "" if not cell["mass_samples"] else (
            f"{cell['mass_sum'] / cell['mass_samples']:.4f} ({cell['mass_minimum']:.3f})")
        rows.append((policy, budget or "", window or "", model, task, length,
                     f"{cell['exact']:.0f}/{cell['asked']:.0f} = {cell['exact'] / cell['asked']:.3f} [{low:.3f}, {high:.3f}]",
                     skipped_share(cell), mass, f"{cell['tokens'] / cell['seconds']:.1f}"))
    rows.sort(key=lambda row: row[3:6])
    return table(("policy", "budget", "window", "model", "task", "tokens", "exact [95 %]", "blocks skipped, of them %",
                  "mass kept: mean (least)", "tokens/s"), rows)


def sum_fidelity(results):
    """{(policy, budget, model, length): {name: values over documents, layers, heads and steps}}."""
    cells = defaultdict(lambda: defaultdict(list))
    for record in results.records("fidelity"):
        cell = cells[(record["policy"], record["budget"], record["model"], record["length"])]
        for row in record["rows"]:
            for name, values in row.items():
                if isinstance(values, list):
                    cell[name] += values
            # The heads of a KV group have one selection.
            cell["by_head"].append((row["layer"], row["kv_head"], row["selected"]))
        cell["seconds"].append(record["seconds"])
        cell["right"].append(record["right"] / record["answer_tokens"])
    return cells


def percentile(values, percent):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def best_blocks(results):
    """{(model, length, budget, tokens of a block): mass that the heaviest such blocks keep}."""
    masses = defaultdict(list)
    for record in results.records("facts"):
        for size, kept in record["blocks"].items():
            budget = json.loads(record["spec"])["token_budget"]
            masses[(record["model"], record["length"], budget, int(size))].append(kept["mass"])
    return {key: statistics.fmean(found) for key, found in masses.items()}


def fidelity_table(results):
    cells = {key: cell for key, cell in sum_fidelity(results).items() if not cell["estimate"]}
    best = best_blocks(results)
    rows = []
    for key in in_order(cells):
        policy, budget, model, length = key
        cell = cells[key]
        mass, oracle = statistics.fmean(cell["mass"]), statistics.fmean(cell["oracle"])
        attainable = best.get((model, length, budget, POLICIES[policy].block_tokens))
        of_blocks = f"{mass / attainable:.4f}" if attainable and not cell["minimal"] and POLICIES[policy].has_budget else ""
        pruned = "" if not cell["minimal"] else (
            f"{statistics.fmean(cell['selected']):.0f} ({sum(cell['selected']) / max(1, sum(cell['minimal'])):.2f})")
        rows.append((policy, budget or "", model, length, f"{mass:.4f}", f"{percentile(cell['mass'], 5):.4f}", f"{oracle:.4f}",
                     f"{mass / oracle:.4f}", of_blocks, f"{statistics.fmean(cell['recall']):.3f}",
                     f"{statistics.median(cell['error']):.4f}", f"{percentile(cell['error'], 99):.3f}",
                     f"{100 * sum(cell['tokens']) / sum(cell['context']):.1f} %",
                     f"{100 - 100 * sum(cell['pages']) / sum(cell['pages_total']):.1f} %", pruned))
    rows.sort(key=lambda row: (row[2], row[3]))
    return table(("policy", "budget", "model", "tokens", "mass kept", "5th percentile", "oracle", "ratio", "of the best blocks", "key recall",
                  "output error, median", "99th percentile", "tokens attended", "blocks skipped",
                  "left by top_p (of the least)"), rows)


def contract_table(results):
    """Of policies under a contract: what is estimated beside what is, and what was done."""
    cells = {key: cell for key, cell in sum_fidelity(results).items() if cell["estimate"]}
    rows = []
    for key in in_order(cells):
        policy, budget, model, length = key
        cell = cells[key]
        mass = cell["mass"]
        errors = [abs(estimate - kept) for estimate, kept in zip(cell["estimate"], mass)]
        wish = POLICIES[policy].decode["quality"]["min_mass"]
        became = {name: cell["outcome"].count(value) / len(mass) for value, name in OUTCOMES.items()}
        rows.append((policy, budget or "", model, length, f"{len(mass):,}", f"{min(mass):.3f}, {percentile(mass, 5):.3f}, "
                     f"{statistics.median(mass):.3f}", f"{statistics.fmean(errors):.4f}", f"{percentile(errors, 99):.4f}",
                     f"{100 * sum(error <= 0.02 for error in errors) / len(mass):.2f} %",
                     ", ".join(f"{name} {100 * share:.1f} %" for name, share in became.items() if share),
                     f"{100 * sum(kept < wish for kept in mass) / len(mass):.3f} %",
                     f"{100 * sum(cell['tokens']) / sum(cell['context']):.1f} %"))
    rows.sort(key=lambda row: (row[2], row[3]))
    return table(("policy", "budget", "model", "tokens", "triples", "mass kept: least, 5th percentile, median",
                  "error of the estimate: mean", "99th percentile", "at most 0.02", "selections",
                  f"triples that keep less than {MIN_MASS}", "tokens attended"), rows)


def facts_tables(results):
    parts = []
    first = {}  # document of each model and length: the others say the same
    for record in sorted(results.records("facts"), key=lambda record: record["seed"]):
        first.setdefault((record["model"], record["length"]), record)
    for record in first.values():
        numbers = json.loads(record["spec"])
        parts.append(f"**{record['model']}, {record['length']:,} tokens, seed {record['seed']}, "
                     f"budget {numbers['token_budget']}:**\n")
        rows = []
        for which, histogram in record["occupancy"].items():
            chunks = sum(histogram)
            filled = chunks - histogram[0]
            tokens = sum(count * held for held, count in enumerate(histogram))
            rows.append((f"heaviest keys: {which}", f"{100 * histogram[0] / chunks:.1f} %", f"{tokens / max(1, filled):.1f}",
                         f"{100 * sum(histogram[9:]) / chunks:.2f} %"))
        parts.append(table(("", "chunks of 64 that hold none", "held by the others, mean", "chunks that hold more than 8"), rows))
        parts.append(table(("the heaviest blocks for a KV group, tokens each", "mass kept"),
                           [(size, f"{kept['mass']:.4f}")
                            for size, kept in sorted(record["blocks"].items(), key=lambda item: int(item[0]))]))
        if overlap := record.get("overlap"):
            parts.append(table(("heaviest pages also heaviest at the step before", "at any step before", "cosine of the two queries"),
                               [(f"{overlap['previous']:.3f}", f"{overlap['earlier']:.3f}", f"{overlap['cosine']:.3f}")]))
        every = record["branches"]["all"]
        parts.append(table(("token that stands for half a chunk of 256", "chooses the right half"),
                           [(which, f"{count / max(1, every):.4f}") for which, count in record["branches"]["right"].items()]))
        bits = sorted(record["bits"].items(), key=lambda item: int(item[0]))
        parts.append(table((f"keys for top_p {record['top_p']}", "mass truly kept", "tokens"),
                           [("exact" if name == "32" else f"{name} bits", f"{kept['mass']:.4f}", f"{kept['tokens']:.0f}")
                            for name, kept in bits]))
        parts.append(table(("scope", "way", "mass kept"),
                           [(scope, way, f"{kept['mass']:.4f}") for scope, ways in record["votes"].items()
                            for way, kept in ways.items()]))
    return "\n\n".join(parts)


def plot_answers(results):
    """Accuracy by length, at the largest budget, and by budget, at the longest length that has several; of each policy those
    of its smallest window. A policy and its extended form are one line; one with a single point is in the table only."""
    cells = sum_answers(results)
    window = {policy: min(key[5] for key in cells if key[0] == policy) for policy, *_ in cells}
    cells = {key: cell for key, cell in cells.items() if key[5] == window[key[0]]}
    names = []
    for model, task in sorted({(key[2], key[3]) for key in cells}):
        own = {key: cell for key, cell in cells.items() if key[2:4] == (model, task)}

        def series(value_of, wanted):
            found = defaultdict(list)
            for key in in_order(own):
                if wanted(key):
                    cell = own[key]
                    found[key[0].removesuffix(" extended")].append(
                        (value_of(key), cell["exact"] / cell["asked"], *wilson(cell["exact"], cell["asked"])))
            return {name: points for name, points in found.items() if len(points) > 1}
        largest = {policy: max(key[1] for key in own if key[0] == policy) for policy, *_ in own}
        if len({key[4] for key in own}) > 1:
            names.append((f"{model}-{task}-length", f"Exact answers of {model} by length: {task}"))
            plot.lines(PLOTS / f"{names[-1][0]}.svg", names[-1][1], "tokens of the document", "exact answers",
                       series(lambda key: key[4], lambda key: key[1] == largest[key[0]]))
        swept = [length for length in {key[4] for key in own} if len({key[1] for key in own if key[4] == length} - {0}) > 1]
        if swept:
            names.append((f"{model}-{task}-budget", f"Exact answers of {model} by budget: {task}, {max(swept):,} tokens"))
            plot.lines(PLOTS / f"{names[-1][0]}.svg", names[-1][1], "budget, tokens", "exact answers",
                       series(lambda key: key[1], lambda key: key[4] == max(swept) and key[1] > 0))
    return names


def plot_budgets(results):
    """What top_p leaves, by layer and KV head, of the longest documents of each model."""
    cells = {key: cell for key, cell in sum_fidelity(results).items() if cell["minimal"]}
    names = []
    for model in sorted({key[2] for key in cells}):
        length = max(key[3] for key in cells if key[2] == model)
        series = {}
        for key in in_order({key: cell for key, cell in cells.items() if key[2:] == (model, length)}):
            heads = defaultdict(list)
            for layer, head, selected in cells[key]["by_head"]:
                heads[(layer, head)] += selected
            series[f"{key[0]} {key[1]}"] = [(percentile(values, 10), statistics.median(values), percentile(values, 90))
                                            for _, values in sorted(heads.items())]
            places = [f"{layer}.{head}" for layer, head in sorted(heads)]
        names.append((f"{model}-budgets", f"Tokens that top_p leaves, by layer and KV head: {model}, {length:,} tokens"))
        plot.ranges(PLOTS / f"{names[-1][0]}.svg", names[-1][1], "layer.head", "tokens: 10th to 90th percentile, median",
                    places, series)
    return names


def print_tables(results):
    for make in (answers_table, fidelity_table, contract_table, facts_tables):
        print(make(results), "\n", flush=True)


def write(results):
    PLOTS.mkdir(exist_ok=True)
    for old in PLOTS.glob("*.svg"):
        old.unlink()
    text = DOCUMENT.read_text()
    images = [*plot_answers(results), *plot_budgets(results)]
    parts = {"answers": answers_table(results), "fidelity": fidelity_table(results), "contract": contract_table(results), "facts": facts_tables(results),
             "plots": "\n".join(f"![{title}](quality/{name}.svg)" for name, title in images)}
    for name, part in parts.items():
        text, found = re.subn(f"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)",
                              lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text, flags=re.DOTALL)
        if found != 1:
            raise RuntimeError(f"{DOCUMENT} has {found} places for {name}; it must have one")
    DOCUMENT.write_text(text)
    print(f"wrote {DOCUMENT} and {len(images)} plots")
