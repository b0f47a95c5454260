"""A plot of a race in plain SVG: a line for each problem, a dot for each implementation, µs on a logarithmic axis."""

from __future__ import annotations

import math
from html import escape

from ._problem import OURS
from ._race import Row
from ._table import title

_LEFT, _WIDTH, LINE, _TOP, _BOTTOM = 230.0, 960.0, 20.0, 56.0, 30.0
# The colours of Okabe and Ito, which colour-blind readers can distinguish.
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#7f7f7f", "#9a6324")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.grid{stroke:#ddd}.tick{text-anchor:middle;fill:#666}"
    ".name{text-anchor:end}@media(prefers-color-scheme:dark){svg{background:#111}text{fill:#ddd}.grid{stroke:#333}}"
)


def plot(rows: list[Row]) -> str:
    """The SVG of all rows that have a time; warm and cold are lines of their own."""
    rows = [row for row in rows if row["us_median"] and row["fault"] is None]
    lines = list(dict.fromkeys((title(row), row["mode"]) for row in rows))
    names = list(dict.fromkeys(row["impl"] for row in sorted(rows, key=lambda row: row["impl"] != OURS)))
    times = [row[key] for row in rows for key in ("us_low", "us_high")] or [1.0, 10.0]
    low, high = _decade_part(min(times), down=True), _decade_part(max(times), down=False)

    def x(us: float) -> float:
        return _LEFT + (math.log(us) - math.log(low)) / (math.log(high) - math.log(low)) * (_WIDTH - _LEFT - 20)

    height = _TOP + LINE * len(lines) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img">',
        f"<style>{STYLE}</style>",
    ]
    for tick in ticks(low, high):
        at = f"{x(tick):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP - 8}" y2="{height - _BOTTOM + 4}"/>')
        parts.append(f'<text class="tick" x="{at}" y="{height - 10}">{tick:g} µs</text>')
    for i, name in enumerate(names):
        place, line = i % 4, i // 4
        cx, cy = 20 + place * 235, 16 + line * 18
        parts.append(f'<circle cx="{cx}" cy="{cy}" r="5" fill="{colour(i)}"/>')
        parts.append(f'<text x="{cx + 10}" y="{cy + 4}">{escape(name[:34])}</text>')
    for row in sorted(rows, key=lambda row: row["impl"] == OURS):  # ours on top
        y = _TOP + LINE * lines.index((title(row), row["mode"])) + LINE / 2
        of_impl = colour(names.index(row["impl"]))
        told = f"{row['impl']}, {title(row)}, {row['mode']}: {row['us_median']:.2f} µs"
        span = f'x1="{x(row["us_low"]):.1f}" x2="{x(row["us_high"]):.1f}" y1="{y}" y2="{y}"'
        parts.append(f'<line {span} stroke="{of_impl}" stroke-width="2"/>')
        dot = f'<circle cx="{x(row["us_median"]):.1f}" cy="{y}" r="5" fill="{of_impl}">'
        parts.append(f"{dot}<title>{escape(told)}</title></circle>")
    for i, (problem, mode) in enumerate(lines):
        y = _TOP + LINE * i + LINE / 2 + 4
        parts.append(f'<text class="name" x="{_LEFT - 12}" y="{y}">{escape(problem)}, {mode}</text>')
    return "\n".join([*parts, "</svg>\n"])


def colour(index: int) -> str:
    """A colour; they repeat after eight."""
    return _COLOURS[index % len(_COLOURS)]


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between two numbers."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    steps = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    return [tick for tick in steps if low * 0.999 <= tick <= high * 1.001]


def _decade_part(us: float, down: bool) -> float:
    """The nearest 1, 2 or 5 times a power of ten, below or above."""
    near = ticks(us / 10, us * 10)
    return max(t for t in near if t <= us) if down else min(t for t in near if t >= us * 1.001)
