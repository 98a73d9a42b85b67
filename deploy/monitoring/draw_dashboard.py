#!/usr/bin/env python3
"""Draws the dashboard from what a Prometheus holds, as one SVG: a look without Grafana.

    deploy/monitoring/draw_dashboard.py http://127.0.0.1:9090 dashboard.svg [--seconds 3600] [--title TEXT]
"""

import argparse
import html
import json
import math
import pathlib
import time
import urllib.parse
import urllib.request

from panels import ROWS

COLUMNS, WIDTH, HEIGHT, GAP, HEADING = 3, 400, 190, 12, 34
LEFT, RIGHT, TOP, BOTTOM, LEGEND = 52, 10, 26, 16, 11
COLOURS = ("#3b7dd8", "#d9822b", "#3a9d5d", "#c23b5a", "#8757b5", "#6b7a8c", "#b59a2c", "#2b9aa8")
POINTS = 120
SCALES = {"percentunit": (100, "%"), "s": (1, " s"), "reqps": (1, "/s"), "Bps": (1, "B/s"), "bytes": (1, "B"), "short": (1, "")}


def substituted(expr, window):
    """The query without Grafana's variables."""
    return expr.replace("$model", ".*").replace("$__rate_interval", window)


class Source:
    """Answers of a Prometheus over the last `seconds`."""

    def __init__(self, url, seconds, window):
        self.url, self.window = url.rstrip("/"), window
        self.end = time.time()
        self.start = self.end - seconds
        self.step = max(1.0, seconds / POINTS)

    def series(self, expr):
        """Returns [(labels, [(time, value)])]; values that are no numbers are left out."""
        query = urllib.parse.urlencode({"query": substituted(expr, self.window), "start": self.start, "end": self.end,
                                        "step": self.step})
        with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{query}", timeout=30) as reply:
            result = json.load(reply)["data"]["result"]
        values = [(one["metric"], [(at, float(value)) for at, value in one["values"] if math.isfinite(float(value))])
                  for one in result]
        return [(labels, points) for labels, points in values if points]


def amount(value, unit):
    factor, suffix = SCALES[unit]
    value *= factor
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}{suffix}"
    return f"{value:.3g}{suffix}"


def legend_of(form, labels):
    for name, value in labels.items():
        form = form.replace("{{" + name + "}}", value)
    return form


def text(x, y, words, size=10, colour="#444", anchor="start", weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{html.escape(words)}</text>')


def draw_panel(panel, source, x, y):
    lines = [(legend_of(legend, labels), points) for expr, legend in panel.queries for labels, points in source.series(expr)]
    parts = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="#fff" stroke="#ddd"/>',
             text(x + 10, y + 17, panel.title, 12, "#222", weight="bold"),
             text(x + WIDTH - RIGHT, y + 17, panel.question, 9, "#888", "end")]
    if not lines:
        return parts + [text(x + WIDTH / 2, y + HEIGHT / 2, "no data", 11, "#999", "middle")]
    legend_rows = math.ceil(min(len(lines), 9) / 3)
    bottom, top = y + HEIGHT - BOTTOM - LEGEND * legend_rows, y + TOP
    most = max(value for _, points in lines for _, value in points) or 1
    for share in (0, 0.5, 1):
        at = bottom - share * (bottom - top)
        parts += [f'<line x1="{x + LEFT}" y1="{at:.1f}" x2="{x + WIDTH - RIGHT}" y2="{at:.1f}" stroke="#eee"/>',
                  text(x + LEFT - 4, at + 3, amount(share * most, panel.unit), 9, "#777", "end")]
    span = (WIDTH - LEFT - RIGHT) / (source.end - source.start)
    for i, (legend, points) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x + LEFT + (at - source.start) * span:.1f},{bottom - value / most * (bottom - top):.1f}"
                        for at, value in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        if i < 9:
            column, row = i % 3, i // 3
            at = x + 10 + column * (WIDTH - 20) / 3
            parts += [f'<rect x="{at:.1f}" y="{bottom + 10 + LEGEND * row:.1f}" width="8" height="3" fill="{colour}"/>',
                      text(at + 11, bottom + 14 + LEGEND * row, legend[:28], 9)]
    return parts


def draw(source, title):
    parts, y = [text(GAP, 24, title, 16, "#222", weight="bold")], HEADING
    for name, panels in ROWS:
        parts.append(text(GAP, y + 18, name, 13, "#555", weight="bold"))
        y += 26
        for i, panel in enumerate(panels):
            parts += draw_panel(panel, source, GAP + i % COLUMNS * (WIDTH + GAP), y + i // COLUMNS * (HEIGHT + GAP))
        y += math.ceil(len(panels) / COLUMNS) * (HEIGHT + GAP)
    width = COLUMNS * (WIDTH + GAP) + GAP
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}" '
            f'font-family="sans-serif"><rect width="100%" height="100%" fill="#f6f7f9"/>\n' + "\n".join(parts) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prometheus", help="its URL")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=3600, help="how far back")
    parser.add_argument("--window", default="1m", help="of rates; at least four scrapes")
    parser.add_argument("--title", default="Kvasir")
    arguments = parser.parse_args()
    source = Source(arguments.prometheus, arguments.seconds, arguments.window)
    arguments.file.write_text(draw(source, arguments.title))


if __name__ == "__main__":
    main()
