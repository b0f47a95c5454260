"""Compares compute-sanitizer with `flashcore check` on the CUDA C++ kernels of `filetests/cuda`.

    python3 xtask/sanitizer/compare.py --flashcore target/release/flashcore --out FOLDER [--jobs 16] [--limit 30]

It needs a GPU, nvcc, compute-sanitizer, and Python 3.11 or newer. It needs no other package and no network.
Each file has the entries `wrong` and `right`, the launch in comments (`//!`), and the hazards of `wrong` by
source line (`// hazard: KIND`). Each entry is launched once without a tool and once under each tool of
compute-sanitizer; `flashcore check` gets the PTX that nvcc makes of the same file. Larger kernels are then
timed one at a time.

FOLDER gets `rows.jsonl`, with a row for each entry and tool, and the output of each run in `logs`.
`--again` makes the rows once more from `logs`, without a GPU: it says nothing about kernels that were not run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import datetime
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ["none", "racecheck", "memcheck", "synccheck", "initcheck"]
# The kernels of the second part: source, launch file, number of launches in one process.
LARGE = [
    ("crates/check/examples/sgemm.cu", "crates/check/examples/sgemm.toml", 5),
    ("filetests/corpus/src/wmma_attention.cu", "xtask/sanitizer/attention.toml", 5),
]
FORMATS = {
    "u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "u64": "Q", "i64": "q",
    "f16": "e", "f32": "f", "f64": "d",
}  # fmt: skip
# CUtensorMapDataType
MAP_TYPES = {"u8": 0, "u16": 1, "u32": 2, "i32": 3, "u64": 4, "i64": 5, "f16": 6, "f32": 7, "f64": 8}


class LaunchError(Exception):
    """A launch that this script cannot make."""


# --- The launch of one kernel, in a process of its own.


class Driver:
    """The CUDA driver, by ctypes."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.device = device

    def code(self, name: str, *args: Any) -> int:
        return int(getattr(self.library, name)(*args))

    def call(self, name: str, *args: Any) -> None:
        if code := self.code(name, *args):
            raise LaunchError(f"{name}: {self.error(code)}")

    def error(self, code: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or b"error %d" % code).decode()

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def upload(self, address: int, contents: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), contents, ctypes.c_size_t(len(contents)))


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


def three(sizes: list[int]) -> list[int]:
    return [*sizes, 1, 1, 1][:3]


def items(arg: dict[str, Any]) -> int:
    return math.prod(arg["shape"]) if "shape" in arg else int(arg["elements"])


def contents(arg: dict[str, Any], rng: random.Random) -> bytes | None:
    """The contents of a buffer before the launch; `None` where it has none."""
    init, count, dtype = arg.get("init", "uninitialised"), items(arg), arg["dtype"]
    if init == "uninitialised":
        return None
    values: Iterator[Any]
    if init == "random":
        real = dtype.startswith("f")
        values = (rng.uniform(-1, 1) if real else rng.randrange(128) for _ in range(count))
    elif init == "iota":
        values = iter(range(count))
    elif init == "zeros" or isinstance(init, (int, float)):
        values = (0 if init == "zeros" else init for _ in range(count))
    else:
        raise LaunchError(f"init = {init!r} is not supported")
    return struct.pack(f"<{count}{FORMATS[dtype]}", *values)


def tensor_map(driver: Driver, arg: dict[str, Any], buffer: dict[str, Any], address: int) -> Any:
    dims, box = arg["dims"], arg["box"]
    size = struct.calcsize(FORMATS[buffer["dtype"]])
    strides = arg.get("strides") or [size * math.prod(dims[:i]) for i in range(1, len(dims))]
    memory = ctypes.create_string_buffer(128 + 64)
    at = (ctypes.addressof(memory) + 63) // 64 * 64
    rank = len(dims)
    driver.call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(at),
        MAP_TYPES[buffer["dtype"]],
        rank,
        ctypes.c_void_p(address + arg.get("offset", 0)),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * 4)(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        {"none": 0, "32": 1, "64": 2, "128": 3}[arg.get("swizzle", "none")],
        0,
        0,
    )
    return ctypes.string_at(at, 128)


def launch(cubin: Path, spec: dict[str, Any], times: int) -> dict[str, Any]:
    """Launches a kernel `times` times, each time on buffers with their first contents."""
    driver = Driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuModuleLoadData", ctypes.byref(module), cubin.read_bytes())
    head = spec["launch"]
    driver.call("cuModuleGetFunction", ctypes.byref(function), module, head["entry"].encode())
    args = [{**arg, "name": arg.get("name", f"argument {i}")} for i, arg in enumerate(spec["arg"])]
    buffers = {arg["name"]: arg for arg in args if arg["role"] == "buffer"}
    addresses = {
        name: driver.allocate(items(arg) * struct.calcsize(FORMATS[arg["dtype"]])) for name, arg in buffers.items()
    }
    values: list[Any] = []
    for arg in args:
        if not arg.get("parameter", True):
            continue
        if arg["role"] == "buffer":
            value: Any = struct.pack("<Q", addresses[arg["name"]])
        elif arg["role"] == "tensor_map":
            value = tensor_map(driver, arg, buffers[arg["of"]], addresses[arg["of"]])
        elif arg["role"] in FORMATS:
            value = struct.pack("<" + FORMATS[arg["role"]], arg["value"])
        else:
            raise LaunchError(f"role {arg['role']!r} is not supported")
        values.append(ctypes.create_string_buffer(value, len(value)))
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    attributes = (Attribute * 2)()
    config = Config(
        grid=(ctypes.c_uint * 3)(*three(head["grid"])),
        block=(ctypes.c_uint * 3)(*three(head["block"])),
        shared=head.get("dynamic_shared", 0),
        attributes=attributes,
    )
    if "cluster" in head:
        attributes[config.count] = Attribute(4, 0, (ctypes.c_uint * 16)(*three(head["cluster"])))
        config.count += 1
    if head.get("cooperative"):
        attributes[config.count] = Attribute(2, 0, (ctypes.c_uint * 16)(1))
        config.count += 1
    answer: dict[str, Any] = {"ms": []}
    for _ in range(times):
        rng = random.Random(1)
        for name, arg in buffers.items():
            if (data := contents(arg, rng)) is not None:
                driver.upload(addresses[name], data)
        driver.call("cuCtxSynchronize")
        start = time.perf_counter()
        code = driver.code("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        code = code or driver.code("cuCtxSynchronize")
        answer["ms"].append(round(1e3 * (time.perf_counter() - start), 4))
        if code:
            answer["error"] = driver.error(code)
            break
    return answer


# --- Reports of compute-sanitizer.

PREFIX = "========= "
# Lines that begin no finding.
NOT_FINDINGS = re.compile(
    r"COMPUTE-SANITIZER|.*SUMMARY:|Target application returned|Process didn't terminate|No attachable process"
    r"|Saved host backtrace|\s*$"
)
PLACE = re.compile(r" in (\S+?):(\d+)(?:[\s:]|$)")


def findings(log: str) -> list[dict[str, Any]]:
    """The findings in a report, each with the source lines that it names."""
    found: list[dict[str, Any]] = []
    for line in log.splitlines():
        if not line.startswith(PREFIX):
            continue
        text = line[len(PREFIX) :]
        if not text.startswith(" "):
            if NOT_FINDINGS.match(text):
                continue
            kind = re.split(r" at | of size |, but | due to |: 0x", text)[0].strip().rstrip(".")
            found.append({"kind": kind, "lines": []})
        if found and "Host Frame" not in text:
            found[-1]["lines"] += [int(place[2]) for place in PLACE.finditer(text)]
    merged: dict[tuple[str, tuple[int, ...]], int] = {}
    for one in found:
        key = (one["kind"], tuple(sorted(set(one["lines"]))))
        merged[key] = merged.get(key, 0) + 1
    return [{"kind": kind, "lines": list(lines), "count": count} for (kind, lines), count in merged.items()]


def outcome(log: str, code: int | None, tool: str) -> str:
    """How a run ended: `ended`, `no_end` (stopped after the limit), `tool_error` or `not_run`."""
    if code is None:
        return "no_end"
    if tool != "none" and "COMPUTE-SANITIZER" not in log:
        return "not_run"
    if re.search(r"Internal Sanitizer Error|Unable to find injection library|Device not supported", log):
        return "tool_error"
    return "ended" if '"ms"' in log else "not_run"


# --- The kernels.


def sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cu"))


def launch_text(source: str, entry: str) -> str:
    lines = [line[3:].lstrip() for line in source.splitlines() if line.startswith("//!")]
    return "\n".join(lines).replace("[launch]", f'[launch]\nentry = "{entry}"', 1) + "\n"


def announced(source: str, mark: str) -> list[dict[str, Any]]:
    """The kinds that a source announces with `// MARK:`, by line."""
    rest = ((line, text.split(f"// {mark}:")) for line, text in enumerate(source.splitlines(), 1))
    return [
        {"kind": kind, "line": line}
        for line, parts in rest
        if len(parts) > 1
        for kind in parts[1].split("//")[0].split()
    ]


def target(source: str) -> str:
    found = re.search(r"^// sm: (\w+)$", source, re.MULTILINE)
    return found[1] if found else "80"


def run(command: list[str], log: Path, limit: float, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Runs a command with its output in `log`, for at most `limit` seconds."""
    start = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ended = {"code": code, "seconds": round(time.perf_counter() - start, 4)}
    log.with_suffix(".json").write_text(json.dumps(ended))
    return ended


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


class Comparison:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.kernels: Path = options.kernels.resolve()
        self.out: Path = options.out.resolve()
        self.logs = self.out / "logs"
        self.compiled: Path = (options.compiled or self.out / "compiled").resolve()
        for folder in (self.logs, self.compiled):
            folder.mkdir(parents=True, exist_ok=True)

    def compile(self, source: Path) -> None:
        """The machine code for the GPU, and the PTX of the target that the source names."""
        text = source.read_text()
        name = source.relative_to(ROOT)
        for arch, ending, kind in [
            (self.options.arch, "cubin", "-cubin"),
            (f"compute_{target(text)}", "ptx", "-ptx"),
        ]:
            to = self.compiled / f"{source.stem}.{ending}"
            if not to.exists():
                command = [self.options.nvcc, kind, "-std=c++17", "-lineinfo", f"-arch={arch}"]
                command += ["-o", str(to), str(name)]
                subprocess.run(command, check=True, cwd=ROOT)

    def compile_all(self) -> None:
        paths = [*sources(self.kernels), *[ROOT / source for source, _, _ in LARGE]]
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(self.compile, paths))
        version = self.compiled / "compiler.txt"
        if not version.exists():
            version.write_text(said(self.options.nvcc, "--version").splitlines()[-1])

    def write_launch(self, source: Path, entry: str) -> None:
        text = launch_text(source.read_text(), entry)
        (self.compiled / f"{source.stem}_{entry}.toml").write_text(text)

    def sanitized(self, name: str, entry: str, tool: str, times: int) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--launch", str(self.compiled / name)]
        command += ["--entry", entry, "--times", str(times)]
        if tool != "none":
            before = [self.options.sanitizer, "--tool", tool, "--print-limit", "100", "--show-backtrace", "no"]
            command = before + command
        run(command, self.logs / f"{name}.{entry}.{tool}.log", self.options.limit, {"CUDA_MODULE_LOADING": "EAGER"})

    def check(self, name: str, entry: str, more: list[str]) -> None:
        """`flashcore check` on the PTX, with its JSON as the log."""
        command = [self.options.flashcore, "check", str(self.compiled / f"{name}.ptx"), "--json"]
        command += ["--launch", str(self.compiled / f"{name}_{entry}.toml"), *more]
        log = self.logs / f"{name}.{entry}.check{''.join(more)}.log"
        run(command, log, self.options.limit)

    def measure(self) -> None:
        options, small = self.options, sources(self.kernels)
        self.compile_all()
        (self.out / "provenance.json").write_text(json.dumps(self.provenance()))
        hangs: list[tuple[str, str, str]] = []
        ends: list[tuple[str, str, str]] = []
        for source in small:
            for entry in ("wrong", "right"):
                self.write_launch(source, entry)
                hazards = announced(source.read_text(), "hazard")
                waits = entry == "wrong" and any(hazard["kind"] == "deadlock" for hazard in hazards)
                (hangs if waits else ends).extend((source.stem, entry, tool) for tool in TOOLS)
        # Kernels that may not end would take GPU time from the others: they run last, all at once.
        for runs, jobs in [(ends, options.jobs), (hangs, len(hangs) or 1)]:
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                list(pool.map(lambda job: self.sanitized(job[0], job[1], job[2], times=1), runs))
        for cu, toml, times in LARGE:
            shutil.copyfile(ROOT / toml, self.compiled / f"{Path(cu).stem}_large.toml")
            for tool in TOOLS:
                self.sanitized(Path(cu).stem, "large", tool, times)
        for name, entry, tool in ends + hangs:
            if tool == "none":
                self.check(name, entry, [])
        for cu, _, _ in LARGE:
            for more in ([], ["--quick"]):
                self.check(Path(cu).stem, "large", more)

    def provenance(self) -> dict[str, Any]:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
        device, driver = said(*query).split(", ")
        return {
            "device": device,
            "driver": driver,
            "compiler": (self.compiled / "compiler.txt").read_text(),
            "sanitizer": said(self.options.sanitizer, "--version").splitlines()[-1],
            "commit": self.options.commit,
            "jobs": self.options.jobs,
            "cores": len(os.sched_getaffinity(0)),
            "limit": self.options.limit,
            "run": uuid.uuid4().hex[:12],
            "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def rows(self) -> list[dict[str, Any]]:
        provenance = json.loads((self.out / "provenance.json").read_text())
        rows = []
        kernels = [(source.stem, entry) for source in sources(self.kernels) for entry in ("wrong", "right")]
        for name, entry in kernels:
            text = (self.kernels / f"{name}.cu").read_text()
            head = {
                "suite": "sanitizer",
                "kernel": name,
                "entry": entry,
                "announced": announced(text, "hazard") if entry == "wrong" else [],
            }
            rows += [{**head, **row, **provenance} for row in self.made(name, entry, [*TOOLS, "check"])]
        for cu, _, _ in LARGE:
            name = Path(cu).stem
            head = {"suite": "sanitizer_time", "kernel": name}
            made = self.made(name, "large", [*TOOLS, "check", "check--quick"])
            rows += [{**head, **row, **provenance} for row in made]
        return rows

    def made(self, name: str, entry: str, tools: list[str]) -> list[dict[str, Any]]:
        """The rows of the runs that were made."""
        there = (tool for tool in tools if (self.logs / f"{name}.{entry}.{tool}.json").exists())
        return [self.row(name, entry, tool) for tool in there]

    def row(self, name: str, entry: str, tool: str) -> dict[str, Any]:
        path = self.logs / f"{name}.{entry}.{tool}.log"
        log = path.read_text(errors="replace")
        ended = json.loads(path.with_suffix(".json").read_text())
        row: dict[str, Any] = {"tool": tool.replace("--", "_"), "seconds": ended["seconds"]}
        if tool.startswith("check"):
            start = log.find("{")
            answer = json.JSONDecoder().raw_decode(log, start)[0] if start >= 0 and ended["code"] is not None else {}
            row["outcome"] = answer.get("verdict", "no_end" if ended["code"] is None else "not_run")
            row["runs"] = answer.get("runs")
            row["found"] = [
                {"kind": one["kind"], "lines": sorted({place["line"] for place in places(one)}), "count": one["count"]}
                for one in answer.get("hazards", [])
            ]
            return row
        row["outcome"] = outcome(log, ended["code"], tool)
        row["found"] = findings(log)
        for line in log.splitlines():
            if line.startswith('{"ms"'):
                row |= json.loads(line)
        return row


def places(cause: dict[str, Any]) -> list[dict[str, Any]]:
    return [cause[key] for key in ("source", "other_source") if cause.get(key)]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the rows and logs")
    parser.add_argument("--kernels", type=Path, default=ROOT / "filetests/cuda", help="folder of the kernels")
    parser.add_argument("--compiled", type=Path, help="folder of cubin and PTX files; those that are there are used")
    parser.add_argument("--flashcore", default="flashcore", help="the command")
    parser.add_argument("--nvcc", default="nvcc", help="the compiler")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="NVIDIA's tool")
    parser.add_argument("--commit", help="the commit of the repository")
    parser.add_argument("--arch", default="sm_90a", help="the GPU's architecture")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one run")
    parser.add_argument("--compile", action="store_true", help="compile the kernels and end")
    parser.add_argument("--again", action="store_true", help="make the rows from the logs in --out")
    parser.add_argument("--launch", help="launch one kernel: path of its cubin file without the ending")
    parser.add_argument("--entry", help="with --launch: its entry")
    parser.add_argument("--times", type=int, default=1, help="with --launch: number of launches")
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.launch:
        cubin = Path(options.launch + ".cubin")
        spec = tomllib.loads(Path(f"{options.launch}_{options.entry}.toml").read_text())
        spec["launch"].setdefault("entry", cubin.stem)
        print(json.dumps(launch(cubin, spec, options.times)), flush=True)
        return
    if options.out is None:
        sys.exit("--out is needed")
    comparison = Comparison(options)
    if options.compile:
        comparison.compile_all()
        return
    if not options.again:
        comparison.measure()
    rows = comparison.rows()
    lines = [json.dumps(row, sort_keys=True, separators=(",", ":")) + "\n" for row in rows]
    (comparison.out / "rows.jsonl").write_text("".join(lines))
    ended = sum(row["outcome"] not in ("not_run", "tool_error") for row in rows)
    print(f"{ended} of {len(rows)} runs; {comparison.out / 'rows.jsonl'}")


if __name__ == "__main__":
    main()
