"""Small plots as SVG, without a library: lines with error bars, and ranges with their medians."""

import html
import math

WIDTH, HEIGHT = 720, 400
LEFT, TOP, RIGHT, BOTTOM = 60, 34, 190, 48
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
DASHES = ("", "6 3", "2 3")


class Axis:
    """Numbers to pixels."""

    def __init__(self, low, high, begin, end, log=False):
        self.low, self.high, self.log = low, high if high > low else low + 1, log
        self.begin, self.end = begin, end

    def __call__(self, value):
        scale = math.log if self.log else float
        part = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return round(self.begin + part * (self.end - self.begin), 1)


class Canvas:
    def __init__(self, title):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
                      f'font-family="sans-serif" font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
        self.text(LEFT, 20, title, 'font-size="14" font-weight="bold"')

    def text(self, x, y, text, style=""):
        self.parts.append(f'<text x="{x}" y="{y}" {style}>{html.escape(str(text))}</text>')

    def line(self, x1, y1, x2, y2, style='stroke="#ddd"'):
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {style}/>')

    def axes(self, x, y, x_ticks, y_ticks, x_label, y_label):
        for value, name in y_ticks:
            self.line(LEFT, y(value), WIDTH - RIGHT, y(value))
            self.text(LEFT - 6, y(value) + 4, name, 'text-anchor="end"')
        for value, name in x_ticks:
            self.text(x(value), HEIGHT - BOTTOM + 16, name, 'text-anchor="middle"')
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, 'text-anchor="middle"')
        self.text(14, HEIGHT / 2, y_label, f'text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})"')

    def legend(self, names):
        for i, name in enumerate(names):
            height = TOP + 10 + 17 * i
            self.line(WIDTH - RIGHT + 12, height, WIDTH - RIGHT + 36, height, style_of(i))
            self.text(WIDTH - RIGHT + 42, height + 4, name)

    def write(self, path):
        path.write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def style_of(i):
    return f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="2" stroke-dasharray="{DASHES[i // len(COLOURS) % len(DASHES)]}"'


def lines(path, title, x_label, y_label, series):
    """series: name -> [(x, y, low, high)], y within [0, 1]; x on a logarithmic axis."""
    xs = sorted({point[0] for points in series.values() for point in points})
    x = Axis(xs[0] / 1.1, xs[-1] * 1.1, LEFT, WIDTH - RIGHT, log=True)
    y = Axis(0, 1, HEIGHT - BOTTOM, TOP)
    canvas = Canvas(title)
    canvas.axes(x, y, [(value, f"{value:,}") for value in xs], [(i / 5, f"{i / 5:.1f}") for i in range(6)], x_label, y_label)
    for i, points in enumerate(series.values()):
        shift = 1.5 * (i - len(series) / 2)  # so that equals are seen beside each other
        places = [(x(value) + shift, y(mean), y(low), y(high)) for value, mean, low, high in sorted(points)]
        for place, mean, low, high in places:
            canvas.line(place, low, place, high, style_of(i).replace('width="2"', 'width="1"'))
            canvas.parts.append(f'<circle cx="{place}" cy="{mean}" r="3" fill="{COLOURS[i % len(COLOURS)]}"/>')
        for (x1, y1, *_), (x2, y2, *_) in zip(places, places[1:]):
            canvas.line(x1, y1, x2, y2, style_of(i))
    canvas.legend(series)
    canvas.write(path)


def ranges(path, title, x_label, y_label, names, series):
    """series: name -> [(low, median, high)], one for each of `names`; y on a logarithmic axis, 0 drawn as 1."""
    high = max(max(top for *_, top in points) for points in series.values())
    x = Axis(-0.5, len(names) - 0.5, LEFT, WIDTH - RIGHT)
    y = Axis(1, max(2, high), HEIGHT - BOTTOM, TOP, log=True)
    canvas = Canvas(title)
    ticks = [2 ** i for i in range(0, int(math.log2(max(2, high))) + 1, 2)]
    step = max(1, len(names) // 12)
    canvas.axes(x, y, list(enumerate(names))[::step], [(tick, tick) for tick in ticks], x_label, y_label)
    for i, points in enumerate(series.values()):
        shift = 5 * (i - (len(series) - 1) / 2)
        for place, (low, median, top) in enumerate(points):
            centre = x(place) + shift
            canvas.line(centre, y(max(1, low)), centre, y(max(1, top)), style_of(i))
            canvas.parts.append(f'<circle cx="{centre}" cy="{y(max(1, median))}" r="3" fill="{COLOURS[i % len(COLOURS)]}"/>')
    canvas.legend(series)
    canvas.write(path)
