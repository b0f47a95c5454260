"""The time of a call on the host, beside that of an empty call through the same interface:

    python overhead.py {jax,tvm} [--device {cpu,cuda}] [--library FILE]

The attention is of one head and one row, so that a call computes next to nothing. `--library` is the file
with the functions for TVM-FFI: that of the kernels hub, or the wheel's.
"""

from __future__ import annotations

import argparse
import statistics
import time


def microseconds(call, wait, calls=500, repeats=21):
    """The median time from call to call. The work has ended before and after."""
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        wait()
    return statistics.median(times)


def jax_calls(device):
    import jax
    import jax.numpy as jnp

    from flashcore_attn.jax import flash_attn_func

    jax.config.update("jax_platforms", device)
    q = jnp.ones((1, 1, 1, 64), jnp.float16)
    ours, empty = jax.jit(lambda x: flash_attn_func(x, x, x)), jax.jit(lambda x: x * 2)
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
    q, k, v, out = (torch.ones(1, 1, 1, 64, dtype=torch.float16, device=device) for _ in range(4))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    text = "q k v out"
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
    times = [microseconds(call, wait) for call in (ours, empty)]
    print(f"{given.interface} on {given.device}: attention {times[0]:.2f} us, an empty call {times[1]:.2f} us")


if __name__ == "__main__":
    main()
