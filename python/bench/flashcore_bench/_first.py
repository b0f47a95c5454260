"""Times the first call with a new program: it is traced, its kernels are generated, and the driver compiles them.

Each measurement has two processes of its own. The first one finds empty caches on disk. The second one finds
the caches that the first one has left.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashcore_attn import flex_attention
from flashcore_attn._errors import invalid

from . import _bench, _features
from ._problem import OURS
from ._rows import Rows

#: FlexAttention, compiled, is the only peer that takes programs.
LIBRARIES = (OURS, "flex")
_REPEATS = 3
_HEADS, _DIM = 16, 128
_LENGTH = 4096
# What is timed: the first two in processes of their own, the third in both.
_WHEN = "new", "from the cache on disk", "another parameter"


def scored(slopes: Tensor) -> Callable[..., Any]:
    """A score program: a factor, and a slope per head."""
    return lambda s, b, h, q, k: s * 1.25 + slopes[h] * (k - q)


def in_document(document: Tensor) -> Callable[..., Any]:
    """A mask program: earlier keys of the query's document."""
    return lambda b, h, q, k: (q >= k) & (document[q] == document[k])


def timings(library: str, device: str, length: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of the first call with a new program and of that with another table, for each kind of program."""
    from torch.nn.attention.flex_attention import create_block_mask

    torch.manual_seed(0)
    if on_gpu := device.startswith("cuda"):
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    q, k, v = (torch.randn(1, _HEADS, length, _DIM, device=device, dtype=dtype) for _ in range(3))
    attend: Callable[..., Any] = flex_attention
    if library != OURS:
        from torch.nn.attention.flex_attention import flex_attention as theirs

        attend = torch.compile(theirs, dynamic=False)

    def timed(**options: Any) -> tuple[float, Any]:
        _wait(device)
        began = time.perf_counter()
        out = attend(q, k, v, **options)
        _wait(device)
        return (time.perf_counter() - began) * 1e3, out

    def blocks(mask: Callable[..., Any]) -> Any:
        return create_block_mask(mask, None, None, length, length, device=device)

    slopes, rows = torch.rand(_HEADS, device=device), torch.arange(length, device=device)
    documents = [rows // (length // parts) for parts in (6, 4)]
    with torch.inference_mode():
        timed()  # the library itself is loaded
        score, mask = scored(slopes), in_document(documents[0])
        cases = {
            "score": ({"score_mod": score}, {"score_mod": scored(2 * slopes)}),
            "mask": ({"block_mask": blocks(mask)}, {"block_mask": blocks(in_document(documents[1]))}),
        }
        found: dict[str, dict[str, Any]] = {}
        for name, (first, other) in cases.items():
            ms, out = timed(**first)
            again, _ = timed(**other)
            work = _features.Work(name, q, k, v, {})
            work.score, work.mask = (score, None) if name == "score" else (None, mask)
            worst, plain = work.error(out)
            found[name] = {"first": ms, "other": again, "err": worst, "err_allowed": 2 * plain + 2e-6}
    return found


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def rows_of(library: str, device: str, repeats: int = _REPEATS, length: int = _LENGTH) -> list[dict[str, Any]]:
    """Rows of a library: one for each kind of program and of call."""
    samples: dict[tuple[str, str], list[float]] = {}
    wrong: dict[str, str | None] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for when in _WHEN[:2]:
                for kind, of in _in_a_process(library, device, length, Path(folder)).items():
                    samples.setdefault((kind, when), []).append(of["first"])
                    samples.setdefault((kind, _WHEN[2]), []).append(of["other"])
                    if not of["err"] <= of["err_allowed"]:
                        wrong[kind] = f"wrong: an error of {of['err']:.2e}, at most {of['err_allowed']:.2e} is allowed"
    name = library if library == OURS else f"{library} {torch.__version__}"
    at = f"H{_HEADS} S{length} D{_DIM}"
    rows = []
    for (kind, when), ms in sorted(samples.items(), key=lambda item: (item[0][0], _WHEN.index(item[0][1]))):
        us = [round(x * 1e3, 1) for x in ms]
        rows.append({
            "suite": "first-call", "problem": f"{kind} program {at}, {when}", "impl": name, "fault": wrong.get(kind),
            "us_median": statistics.median(us), "us_low": min(us), "us_high": max(us), "samples": len(us),
            "all_us": us,
        })  # fmt: skip
    return rows


def _in_a_process(library: str, device: str, length: int, caches: Path) -> dict[str, dict[str, Any]]:
    names = ("FLASHCORE_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = os.environ | {name: str(caches / name.lower()) for name in names}
    command = [sys.executable, "-m", "flashcore_bench._first", library, device, str(length)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the process wrote no message"])[-1])
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of each kind of call."""
    lines = ["| problem | impl | ms | least | most | fault |", "|---|---|---:|---:|---:|---|"]
    for row in rows:
        ms = [f"{row[name] / 1e3:.4g}" for name in ("us_median", "us_low", "us_high")]
        lines.append(f"| {row['problem']} | {row['impl']} | {' | '.join(ms)} | {row['fault'] or ''} |")
    return "\n".join(lines)


def chosen(peers: str | None) -> list[str]:
    """FlashCore and the peers of a list of names; all if None, FlashCore alone for ``none``.

    Raises:
        ValueError: with what is accepted.
    """
    wanted = list(LIBRARIES[1:]) if peers is None else [] if peers == "none" else peers.split(",")
    for name in wanted:
        if name not in LIBRARIES[1:]:
            raise invalid("peers", name, ", ".join((*LIBRARIES[1:], "none")))
    return [OURS, *wanted]


def run(args: Any) -> int:
    """0 if all outputs of FlashCore were correct, 1 if not, 2 if nothing could start."""
    if not torch.cuda.is_available():
        print("flashcore_bench: first is timed on a GPU, and PyTorch sees none", file=sys.stderr)
        return 2
    torch.cuda.set_device(args.device)
    provenance = json.loads(_bench.Session(args.device).provenance())
    try:
        libraries = chosen(args.peers)
        kept = Rows(args, provenance["commit"])
    except (OSError, ValueError) as error:
        print(f"flashcore_bench: {error}", file=sys.stderr)
        return 2
    for library in libraries:
        print(f"first: {library}, {2 * _REPEATS} processes", file=sys.stderr, flush=True)
        try:
            rows = rows_of(library, f"cuda:{args.device}")
        except RuntimeError as error:
            print(f"flashcore_bench: {library}: {error}", file=sys.stderr)
            if library == OURS:
                return 1
            continue
        for row in rows:
            kept.add(row | provenance)
    if not args.json:
        print(table(kept.every))
    return 1 if any(row["impl"] == OURS and row["fault"] for row in kept.every) else 0


if __name__ == "__main__":
    print(json.dumps(timings(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
