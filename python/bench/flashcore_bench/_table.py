"""Rows as a table for people, and their summary."""

from __future__ import annotations

import math
from typing import Any

from ._problem import DRAWN, OURS
from ._race import Row

Comparison = dict[str, Any]


def title(row: Row) -> str:
    """The problem in a few words."""
    p = row["problem"]
    heads = f"{p['heads_q']}" if p["heads_q"] == p["heads_kv"] else f"{p['heads_q']}/{p['heads_kv']}"
    seq = f"{p['seq_q']}" if p["seq_q"] == p["seq_kv"] else f"{p['seq_q']}x{p['seq_kv']}"
    mask = "" if p["mask"] == "none" else f" {p['mask']}"
    softcap = f" softcap {p['softcap']:g}" if "softcap" in p else ""
    return f"B{p['batch']} H{heads} S{seq} D{p['head_dim']} {p['dtype']}{mask}{softcap}"


def table(rows: list[Row]) -> str:
    """A line for each row; a ratio above 1 says how many times faster FlashCore was."""
    head = [
        "problem",
        "mode",
        "implementation",
        "us",
        "5-95 %",
        "TFLOP/s",
        "max error",
        "flashcore is faster by",
        "verdict",
    ]
    cells = [head]
    for row in rows:
        cells.append([title(row), row["mode"], row["impl"], *_figures(row, _against(rows, row))])
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    left = {0, 1, 2, 8}
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _figures(row: Row, comparison: Comparison | None) -> list[str]:
    if row["us_median"] is None:
        return ["-", "-", "-", "-", "-", row["fault"] or "failed"]
    ratio = verdict = "-"
    if comparison:
        ratio = f"{comparison['ratio']:.3f} [{comparison['low']:.3f}, {comparison['high']:.3f}]"
        verdict = comparison["verdict"]
    return [
        f"{row['us_median']:.2f}",
        f"{row['us_low']:.2f}-{row['us_high']:.2f}",
        "-" if row["tflops"] is None else f"{row['tflops']:.1f}",
        "-" if row["err_max"] is None else f"{row['err_max']:.1e}",
        ratio,
        verdict if row["fault"] is None else f"does not count: {row['fault']}",
    ]


def _first(rows: list[Row], row: Row) -> Row | None:
    """FlashCore's row of the same race."""
    same = (r for r in rows if r["impl"] == OURS and r["problem"] == row["problem"] and r["mode"] == row["mode"])
    return next(same, None)


def _against(rows: list[Row], row: Row) -> Comparison | None:
    first = _first(rows, row)
    if first is None or first is row or not first["ratio_vs"]:
        return None
    comparison: Comparison | None = first["ratio_vs"]["all"].get(row["impl"])
    return comparison


#: How many of the slowest problems the summary of random problems lists.
_WORST = 10


def summary(rows: list[Row]) -> list[str]:
    """For each suite and mode: FlashCore against the best peer of each problem. For random problems also the worst."""
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for row in rows:
        if row["impl"] == OURS and row["ratio_vs"] and row["ratio_vs"]["comparison"]:
            found = (row["ratio_vs"]["comparison"]["ratio"], title(row))
            ratios.setdefault((row["suite"], row["mode"]), []).append(found)
    lines = []
    for (suite, mode), all_of in ratios.items():
        lines += of_ratios(suite, all_of, f", {mode}")
    return lines


def of_ratios(suite: str, ratios: list[tuple[float, str]], mode: str = "") -> list[str]:
    """The geometric mean of ratios against the best peers of problems; for random problems also the worst."""
    mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
    least, where = min(ratios)
    lines = [
        f"{suite}{mode}: {mean:.3f} times as fast as the best peer (geometric mean of {len(ratios)}), "
        f"least {least:.3f} at {where}"
    ]
    if suite in DRAWN:
        behind = sum(ratio < 1 for ratio, _ in ratios)
        lines.append(f"behind the best peer: {behind} of {len(ratios)} ({behind / len(ratios):.1%})")
        lines += [f"  {ratio:.3f}  {problem}" for ratio, problem in sorted(ratios)[:_WORST]]
    return lines
