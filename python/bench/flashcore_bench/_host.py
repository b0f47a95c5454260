"""The host time of a call: each library's Python function, with its allocation of the output, without waiting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from flashcore_attn import flash_attn_func, scaled_dot_product_attention

from ._problem import OURS, Problem
from ._race import Row, Run, inputs, reason

Call = Callable[[], Any]

CALLS = 50  # calls in a row: far fewer than a stream queues before a launch waits


def host(run: Run, problem: Problem) -> list[Row]:
    """A row for each function. Turns are interleaved, and every other round runs in the opposite order."""
    sdpa, flash = inputs(problem, "bhsd", run.device), inputs(problem, "bshd", run.device)
    calls: dict[str, tuple[Call, Call]] = {}
    if problem.aligned_as("causal-top-left") and problem.window is None and problem.softcap is None:
        calls[OURS] = (lambda: scaled_dot_product_attention(*sdpa, is_causal=problem.causal), nullcontext)
    if problem.aligned_as("causal"):
        name = f"{OURS} flash_attn_func"
        options: dict[str, Any] = {"window_size": problem.window or (-1, -1), "softcap": problem.softcap or 0.0}
        calls[name] = (lambda: flash_attn_func(*flash, causal=problem.causal, **options), nullcontext)
    rows = []
    with torch.no_grad():
        for peer in run.peers:
            run.say(f"{peer.key}: warming up (the first time it may compile)")
            try:
                call = partial(peer.load(problem), *(sdpa if peer.layout == "bhsd" else flash))
                with peer.context():
                    call()
                torch.cuda.synchronize()
                calls[peer.name] = (call, peer.context)
            except Exception as error:  # a peer may raise any exception
                why = reason(error)
                rows.append(json.loads(run.session.failed("host", peer.name, problem.stated, "warm", why)))
        run.say("timing")
        for name, samples in _interleaved(calls, run.seconds).items():
            rows.append(json.loads(run.session.host(name, problem.stated, CALLS, samples)))
    return rows


def _interleaved(calls: dict[str, tuple[Call, Call]], seconds: float) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start, rounds = time.perf_counter(), 0
    while rounds < 12 or time.perf_counter() - start < seconds:
        order = list(calls.items())
        for name, (call, context) in order if rounds % 2 == 0 else reversed(order):
            with context():
                samples[name].append(_time(call))
        rounds += 1
    return samples


def _time(call: Call) -> float:
    """Microseconds of one call."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / CALLS * 1e6
