"""The time of a call on the host above that of an empty call through the same interface:

    python overhead.py {jax,tvm} [--device {cpu,cuda}] [--library FILE]

The attention is causal, of 8 heads and one row, so that a call computes next to nothing. `--library` is the
file with the functions for TVM-FFI: that of the kernels hub, or the wheel's. Each line of the output is a
measurement, which `cargo xtask measure host ROWS.jsonl python overhead.py …` keeps for a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

CALLS, REPEATS = 200, 51


def microseconds(call, wait):
    """The time from call to call. The work has ended before."""
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def tell(name, samples):
    measure = {
        "measure": name,
        "unit": "us",
        "calls": CALLS * REPEATS,
        "median": statistics.median(samples),
        "p99": max(samples),
        "samples": samples,
    }
    print("MEASURE", json.dumps(measure))


def jax_calls(device):
    import jax
    import jax.numpy as jnp

    from flashcore_attn.jax import flash_attn_func

    jax.config.update("jax_platforms", device)
    q = jnp.ones((1, 1, 8, 64), jnp.float16)
    ours, empty = jax.jit(lambda x: flash_attn_func(x, x, x, causal=True)), jax.jit(lambda x: x * 2)
    results = []

    def call(function):
        def run():
            results[:] = [function(q)]

        return run

    return call(ours), call(empty), lambda: jax.block_until_ready(results)


def tvm_calls(device, library):
    import torch
    import tvm_ffi

    module = tvm_ffi.load_module(library)
    q, k, v, out = (torch.ones(1, 1, 8, 64, dtype=torch.float16, device=device) for _ in range(4))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    text = "q k v out; causal"
    return lambda: module.attention(text, q, k, v, out), lambda: torch.add(q, k, out=out), wait


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interface", choices=["jax", "tvm"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--library")
    given = parser.parse_args()
    if given.interface == "jax":
        ours, empty, wait = jax_calls(given.device)
    elif given.library is None:
        parser.error("--library is missing: build/*/libflashcore.so of `cargo xtask hub`")
    else:
        ours, empty, wait = tvm_calls(given.device, given.library)
    ours(), empty()
    samples = [[microseconds(call, wait) for call in (ours, empty)] for _ in range(REPEATS)]
    of_ours, of_empty = zip(*samples, strict=True)
    door = {"jax": "JAX", "tvm": "TVM-FFI"}[given.interface]
    where = "" if given.device == "cuda" else " on the CPU"
    tell(f"{door}: attention{where}", of_ours)
    tell(f"{door}: an empty call{where}", of_empty)
    tell(f"{door}: attention above an empty call{where}", [ours - empty for ours, empty in samples])


if __name__ == "__main__":
    main()
