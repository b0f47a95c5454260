"""The time of a call on the host above that of an empty call through the same interface:

    python overhead.py {jax,tvm} [--device {cpu,cuda}] [--library FILE] [--processes N]

The attention is causal, of 8 heads and one row, so that a call computes next to nothing. In JAX, empty calls
are an operation of its own and a foreign function in C (`empty_call.c`), which launches an empty kernel on a
GPU and needs a C compiler; `--empty` is that function's library if it is compiled. `--library` is the
file with the functions for TVM-FFI: that of the kernels hub, or the wheel's. A call takes up to 2 % more or
less in another process, so the samples are those of several processes. Each line of the output is a
measurement, which `cargo xtask measure host ROWS.jsonl python overhead.py …` keeps for a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CALLS, REPEATS = 50, 400


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
        "calls": CALLS * len(samples),
        "median": statistics.median(samples),
        "p99": max(samples),
        "samples": samples,
    }
    print("MEASURE", json.dumps(measure))


def foreign_function(device, library):
    """An empty foreign function with the arguments and the result of a call of attention."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        if library is None:
            library = f"{folder}/empty.so"
            source = Path(__file__).with_name("empty_call.c")
            flags = ["-std=c11", "-O2", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir(), "-o", library]
            subprocess.run(["cc", *flags, source, "-ldl"], check=True)
        functions = ctypes.CDLL(library)
    function, platform = (functions.empty_cuda, "CUDA") if device == "cuda" else (functions.empty_host, "cpu")
    jax.ffi.register_ffi_target("empty", jax.ffi.pycapsule(function), platform=platform)
    return lambda x: jax.ffi.ffi_call("empty", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, x, x, call="q k v out")


def jax_calls(device, library):
    import jax
    import jax.numpy as jnp

    from flashcore_attn.jax import flash_attn_func

    jax.config.update("jax_platforms", device)
    q = jnp.ones((1, 1, 8, 64), jnp.float16)
    results = []

    def call(function):
        compiled = jax.jit(function)

        def run():
            results[:] = [compiled(q)]

        return run

    ours = call(lambda x: flash_attn_func(x, x, x, causal=True))
    empty = {"an empty call": call(lambda x: x * 2), "an empty function": call(foreign_function(device, library))}
    return ours, empty, lambda: jax.block_until_ready(results)


def tvm_calls(device, library):
    import torch
    import tvm_ffi

    module = tvm_ffi.load_module(library)
    q, k, v, out = (torch.ones(1, 1, 8, 64, dtype=torch.float16, device=device) for _ in range(4))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    text = "q k v out; causal"
    return lambda: module.attention(text, q, k, v, out), {"an empty call": lambda: torch.add(q, k, out=out)}, wait


def in_processes(count):
    """The samples of that many processes, together."""
    samples = {}
    for _ in range(count):
        command = [sys.executable, __file__, *sys.argv[1:], "--processes", "1"]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        for line in output.splitlines():
            measure = json.loads(line.removeprefix("MEASURE "))
            samples.setdefault(measure["measure"], []).extend(measure["samples"])
    for name, of_all in samples.items():
        tell(name, of_all)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interface", choices=["jax", "tvm"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--library")
    parser.add_argument("--empty")
    parser.add_argument("--processes", type=int, default=5)
    given = parser.parse_args()
    if given.processes > 1:
        in_processes(given.processes)
        return
    if given.interface == "jax":
        ours, empty, wait = jax_calls(given.device, given.empty)
    elif given.library is None:
        parser.error("--library is missing: build/*/libflashcore.so of `cargo xtask hub`")
    else:
        ours, empty, wait = tvm_calls(given.device, given.library)
    calls = [ours, *empty.values()]
    for call in calls:
        call()
    samples = [[0.0] * len(calls) for _ in range(REPEATS)]
    for repeat, row in enumerate(samples):
        # Short samples in another order each time: the clock of a CPU changes, and each call finds the caches
        # of the one before.
        for i in range(len(calls)):
            i = (i + repeat) % len(calls)
            row[i] = microseconds(calls[i], wait)
    of_ours, *of_empty = zip(*samples, strict=True)
    door = {"jax": "JAX", "tvm": "TVM-FFI"}[given.interface]
    where = "" if given.device == "cuda" else " on the CPU"
    tell(f"{door}: attention{where}", of_ours)
    for name, times in zip(empty, of_empty, strict=True):
        tell(f"{door}: {name}{where}", times)
        tell(f"{door}: attention above {name}{where}", [a - b for a, b in zip(of_ours, times, strict=True)])


if __name__ == "__main__":
    main()
