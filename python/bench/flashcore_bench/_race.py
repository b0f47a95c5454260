"""The race on a GPU: prepares all contestants, passes them to Rust, and collects the rows."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashcore_attn._errors import FlashCoreError

from ._capture import Captured, describe
from ._peers import Peer
from ._problem import OURS, Problem

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}

Row = dict[str, Any]


class Run(NamedTuple):
    """The peers, the settings of the races, and where to report."""

    session: Any
    peers: list[Peer]
    modes: list[str]
    seconds: float
    overlapping: bool
    device: int
    say: Callable[[str], None]


def inputs(problem: Problem, layout: str, device: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for q, k and v, dense in a layout. The values do not matter, because the race writes its own."""
    dtype, p = DTYPES[problem.dtype], problem

    def make(heads: int, seq: int) -> Tensor:
        shape = (p.batch, heads, seq, p.head_dim) if layout == "bhsd" else (p.batch, seq, heads, p.head_dim)
        return torch.randn(shape, device=f"cuda:{device}", dtype=torch.bfloat16).to(dtype)

    return make(p.heads_q, p.seq_q), make(p.heads_kv, p.seq_kv), make(p.heads_kv, p.seq_kv)


def race(run: Run, suite: str, problem: Problem) -> Iterator[Row]:
    """The rows of one problem: FlashCore's first, then the peers'. A failed contestant's row has the reason."""
    try:
        yield from _race(run, suite, problem)
    except (FlashCoreError, RuntimeError, MemoryError) as error:
        for mode in run.modes:
            yield json.loads(run.session.failed(suite, OURS, problem.stated, mode, reason(error)))
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _race(run: Run, suite: str, problem: Problem) -> Iterator[Row]:
    layouts = ("bhsd", *{peer.layout for peer in run.peers})
    tensors = {layout: inputs(problem, layout, run.device) for layout in layouts}
    run.say("drawing inputs, computing the answers")
    field = run.session.race(problem.stated)
    absent: list[tuple[str, str]] = []
    try:
        run.say("flashcore: preparing")
        field.ours(suite, *(x.data_ptr() for x in tensors["bhsd"]))
        if run.overlapping and not field.ours_overlapping(*(x.data_ptr() for x in tensors["bhsd"])):
            run.say("its plan has no overlapping launches")
    except FlashCoreError as error:
        absent.append((OURS, reason(error)))
    held = []
    for peer in run.peers:
        run.say(f"{peer.key}: warming up (the first time it may compile)")
        try:
            held.append(_enter(field, peer, problem, tensors[peer.layout]))
        except Exception as error:  # a peer may raise any exception; the others continue
            absent.append((peer.name, reason(error)))
            torch.cuda.empty_cache()
    for mode in run.modes:
        run.say(f"racing, {mode}")
        for name, why in absent:
            yield json.loads(run.session.failed(suite, name, problem.stated, mode, why))
        if len(absent) <= len(run.peers):
            torch.cuda.synchronize()  # the race has a stream of its own
            torch.cuda.empty_cache()  # and memory
            yield from (json.loads(row) for row in field.run(suite, mode, run.seconds))
    del field, held  # the graphs must live longer than the code that launches them


def _enter(field: Any, peer: Peer, problem: Problem, tensors: tuple[Tensor, Tensor, Tensor]) -> Captured:
    with torch.no_grad(), peer.context(), _products(problem):
        function = peer.load(problem)
        captured = Captured(lambda: function(*tensors), field.calls(), peer.layout)
    q, k, v = (describe(x, peer.layout) for x in tensors)
    field.peer(peer.name, captured.warm, captured.cold, q, k, v, captured.out, peer.out)
    return captured


@contextlib.contextmanager
def _products(problem: Problem) -> Iterator[None]:
    """Lets PyTorch multiply float32 in tf32 if the problem does."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if problem.dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def reason(error: BaseException) -> str:
    """The error as one short line without paths, because a row may not show the file system of its machine."""
    words = (word for word in str(error).split() if not word.startswith("/"))
    text = " ".join(words) or "no reason given"
    return f"{type(error).__name__}: {text}"[:300]
