#!/usr/bin/env python3
"""The plots of docs/performance.md, drawn from the tables of docs/measurements: no figure is written here.

    tests/bench/plot_performance.py           writes docs/performance/*.svg
    tests/bench/plot_performance.py --check   exit code 1 when a plot is not the one that the tables give
"""

import argparse
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "quality"))

from plot import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Canvas, style_of  # noqa: E402
from results import wilson  # noqa: E402

MEASUREMENTS = ROOT / "docs" / "measurements"
FOLDER = ROOT / "docs" / "performance"


def number(cell):
    """The first number of a cell, without marks and separators of thousands."""
    return float(re.search(r"[\d.]+", cell.replace(",", "").replace("*", ""))[0])


def table_of(page, first, after=""):
    """The first table of a page, after the text `after`, whose first header cell is `first`: [header, row, ...]."""
    text = (MEASUREMENTS / page).read_text()
    if after not in text:
        raise SystemExit(f"{page} does not say '{after}'")
    found = []
    for line in text[text.index(after):].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if found or (line.startswith("|") and cells[0] == first):
            if not line.startswith("|"):
                break
            found.append(cells)
    if not found:
        raise SystemExit(f"{page} has no table that begins with '{first}'")
    return [found[0], *found[2:]]


def rows(page, first):
    """The same: (header, {name: cells})."""
    header, *table = table_of(page, first)
    return header, {cells[0]: cells for cells in table}


def draw(path, title, x_label, y_label, x_ticks, y_ticks, series):
    """series: name -> [(x, y, low, high)]; x on a logarithmic axis."""
    x = Axis(min(x_ticks) / 1.15, max(x_ticks) * 1.15, LEFT, WIDTH - RIGHT, log=True)
    y = Axis(min(y_ticks), max(y_ticks), HEIGHT - BOTTOM, TOP)
    canvas = Canvas(title)
    canvas.axes(x, y, [(tick, f"{tick:,}") for tick in x_ticks], [(tick, f"{tick:g}") for tick in y_ticks], x_label, y_label)
    for i, points in enumerate(series.values()):
        shift = 4 * (i - (len(series) - 1) / 2) if len(points) == 1 else 0  # so that points beside each other are seen
        places = [(x(at) + shift, y(value), y(low), y(high)) for at, value, low, high in points]
        for place, value, low, high in places:
            if low != high:
                canvas.line(place, low, place, high, style_of(i).replace('width="2"', 'width="1"'))
            canvas.parts.append(f'<circle cx="{place:g}" cy="{value}" r="3.5" fill="{COLOURS[i]}"/>')
        for (x1, y1, *_), (x2, y2, *_) in zip(places, places[1:]):
            canvas.line(x1, y1, x2, y2, style_of(i))
    canvas.legend(series)
    canvas.write(path)


def exact(x, count, answers=128):
    low, high = wilson(count, answers)
    return x, count / answers, low, high


def decode_step(folder):
    header, table = rows("gpu-steps.md", "one GPU")
    contexts = [4096, 131072, 524288]
    columns = [header.index(f"{context:,}") for context in contexts]
    series = {name: [(context, number(table[name][column]), 0, 0) for context, column in zip(contexts, columns)]
              for name in ("all", "infinitehip", "infinitehip+interval", "quest+top_p", "quest")}
    draw(folder / "decode-step.svg", "A whole decode step, Llama-3.1-8B shape, one H200", "tokens of context",
         "milliseconds", contexts, [0, 5, 10, 15, 20, 25], series)


def answers(folder):
    _, table = rows("answers.md", "policy")
    quest = "quest, sink 64, window 128, budget 2,048; 4,096; 7,936"
    bounds = "quest by bounds (`score: bound`), as above"
    counts = {name: [number(cell) for cell in table[name][1].split(";")] for name in (quest, bounds)}
    read = [64 + 128 + budget for budget in (2048, 4096, 7936)]
    three = 128 + 1024 + 2048
    names = {"tokenselect": "tokenselect", "infinitehip 5k": "infinitehip 5k",
             "infinitehip, interval 8": "infinitehip 8, 4, 2 (`interval: 8`)", "infinitehip": "infinitehip",
             "infinitehip, its own intervals": "infinitehip 16, 8, 4 (the preset's own)"}
    series = {label: [exact(three, number(table[name][1]))] for label, name in names.items()}
    series["quest"] = [exact(x, count) for x, count in zip(read, counts[quest])]
    series["quest by bounds"] = [exact(x, count) for x, count in zip(read, counts[bounds])]
    draw(folder / "answers-128k.svg", "Answers kept at 128,000 tokens: needle-8k, multi_key, 128 answers",
         "tokens attended to: sink, window and budget", "exact answers", [2000, 3200, 4300, 8100],
         [0, 0.2, 0.4, 0.6, 0.8, 1], series)


def prompts(folder):
    header, *table = table_of("gpu-service.md", "prompt tokens")
    lengths = [int(number(cells[0])) for cells in table]
    series = {name: [(length, 1000 * number(cells[header.index(column)]) / length, 0, 0) for length, cells in zip(lengths, table)]
              for name, column in (("transformers", "transformers reads"), ("Kvasir, dense", "dense"), ("Kvasir, quest", "quest"))}
    draw(folder / "prompts.svg", "Reading a prompt through the service, 8B shape, one H100", "tokens of the prompt",
         "microseconds a token", lengths, [0, 20, 40, 60, 80, 100], series)


def streams(folder):
    series = {}
    for name, after, column in (("vLLM 0.26.0", "## Beside vLLM", "between tokens: vLLM"),
                                ("Kvasir, dense", "With [products of a batch]", "between tokens")):
        header, *table = table_of("gpu-service.md", "streams", after)
        series[name] = [(int(number(cells[0])), number(cells[header.index(column)]), 0, 0)
                        for cells in table if cells[header.index("of tokens")] == "1,024"]
    draw(folder / "streams.svg", "Time between two tokens of a stream, prompts of 1,024 tokens, 8B shape, H100", "streams",
         "milliseconds", [x for x, *_ in series["Kvasir, dense"]], [0, 3, 6, 9, 12, 15], series)


def cpu_token(folder):
    header, table = rows("cpu.md", "AVX2")
    cells = [("a token after 64, ms", 64), ("a token after 512, ms", 512), ("a token after 2,048, ms", 2048),
             ("a token after 6,000, ms, dense", 6000)]
    series = {f"{'' if 'llama' in name else 'Kvasir '}{name}":
              [(x, number(table[row][column]), 0, 0) for row, x in cells]
              for column, name in enumerate(header) if column > 0}
    series["Kvasir int8, quest of 1,024"] = [(6000, number(table["6,000, quest of 1,024"][4]), 0, 0)]
    draw(folder / "cpu-token.svg", "A token on two CPU cores held to AVX2, SmolLM2-135M, dense", "tokens of context",
         "milliseconds", [64, 512, 2048, 6000], [0, 10, 20, 30, 40, 50], series)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there, write nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) if check else FOLDER
        folder.mkdir(exist_ok=True)
        for plot in (decode_step, answers, prompts, streams, cpu_token):
            plot(folder)
        if not check:
            return 0
        stale = [path.name for path in sorted(folder.glob("*.svg"))
                 if not (FOLDER / path.name).exists() or (FOLDER / path.name).read_text() != path.read_text()]
    for name in stale:
        print(f"docs/performance/{name} is not what docs/measurements gives; run tests/bench/plot_performance.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
