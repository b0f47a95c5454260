"""A picture of the work of a GPU during a call, in plain SVG: a line for each stream, a bar for each kernel or copy."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ._plot import LINE, STYLE, colour, ticks

_LEFT, _WIDTH, _TOP, _BOTTOM = 110.0, 960.0, 34.0, 30.0
#: The kinds of work, and what the names of their kernels contain.
_KINDS = (
    ("attention", ("flash_",)),
    ("copy to another GPU", ("Memcpy",)),
    ("NCCL", ("nccl",)),
    ("signal", ("barrier", "signal")),
    ("other kernels", ("",)),
)


class Bar(NamedTuple):
    """A kernel or a copy."""

    name: str
    stream: int
    #: Microseconds since the first one began, and its duration.
    start: float
    us: float

    @property
    def kind(self) -> int:
        """The index of its kind."""
        return next(i for i, (_, words) in enumerate(_KINDS) if any(word in self.name for word in words))


def bars_of(events: list[dict[str, Any]], calls: int) -> list[Bar]:
    """The work of the last of some equal calls, of a trace's events."""
    categories = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        Bar(event["name"], int(event["args"]["stream"]), float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("cat") in categories
    ]
    found.sort(key=lambda bar: bar.start)
    last = found[len(found) - len(found) // calls :]
    return [bar._replace(start=bar.start - last[0].start) for bar in last]


def recorded(call: Callable[[], Any], calls: int = 3) -> list[Bar]:
    """The work of a GPU during one call, of several that follow each other."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        return bars_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"], calls)


def timeline(bars: list[Bar], title: str) -> str:
    """The SVG. Streams are in the order of their first work."""
    streams = list(dict.fromkeys(bar.stream for bar in bars))
    end = max((bar.start + bar.us for bar in bars), default=1.0)
    height = _TOP + LINE * len(streams) + _BOTTOM

    def x(us: float) -> float:
        return _LEFT + us / end * (_WIDTH - _LEFT - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
    ]
    shown = sorted({bar.kind for bar in bars})
    for place, kind in enumerate(shown):
        left = 20 + place * 180
        parts.append(f'<rect x="{left}" y="10" width="10" height="10" fill="{colour(kind)}"/>')
        parts.append(f'<text x="{left + 15}" y="19">{_KINDS[kind][0]}</text>')
    step = max(tick for tick in (1.0, *ticks(1.0, 1e9)) if tick <= max(1.0, end / 4))
    for number in range(int(end / step) + 1):
        at = f"{x(number * step):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP - 6}" y2="{height - _BOTTOM + 4}"/>')
        parts.append(f'<text class="tick" x="{at}" y="{height - 10}">{number * step:g} µs</text>')
    for i, stream in enumerate(streams):
        y = _TOP + LINE * i
        parts.append(f'<text class="name" x="{_LEFT - 12}" y="{y + LINE / 2 + 4}">stream {stream}</text>')
        for bar in (bar for bar in bars if bar.stream == stream):
            told = f"{bar.name[:80]}: {bar.us:.0f} µs from {bar.start:.0f} µs on"
            width = max(0.5, x(bar.start + bar.us) - x(bar.start))
            box = f'x="{x(bar.start):.1f}" y="{y + 3}" width="{width:.1f}" height="{LINE - 6}"'
            parts.append(f'<rect {box} fill="{colour(bar.kind)}"><title>{escape(told)}</title></rect>')
    return "\n".join([*parts, "</svg>\n"])
