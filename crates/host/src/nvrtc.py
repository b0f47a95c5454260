"""Compiles CUDA C++ to PTX with NVRTC: nvrtc.py LIBRARY < request > answer.

The request is JSON: source, name, options, headers (name to text), expressions (template instances). The
answer is JSON: ptx, names (expression to the name in the PTX). Exit 1: the source is wrong; 2: no NVRTC."""

import ctypes
import json
import os
import sys

try:
    nvrtc = ctypes.CDLL(sys.argv[1])
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(2)

request = json.load(sys.stdin)
headers = request["headers"]


def strings(texts):
    return (ctypes.c_char_p * len(texts))(*[os.fsencode(text) for text in texts])


program = ctypes.c_void_p()
created = nvrtc.nvrtcCreateProgram(
    ctypes.byref(program),
    os.fsencode(request["source"]),
    os.fsencode(request["name"]),
    len(headers),
    strings(list(headers.values())),
    strings(list(headers)),
)
if created != 0:
    print("nvrtcCreateProgram failed", file=sys.stderr)
    sys.exit(2)


def text(size_of, get):
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    get(program, buffer)
    return buffer.value


for expression in request["expressions"]:
    nvrtc.nvrtcAddNameExpression(program, os.fsencode(expression))
options = request["options"]
failed = nvrtc.nvrtcCompileProgram(program, len(options), strings(options)) != 0
log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
sys.stderr.buffer.write(log)
if failed:
    sys.exit(1)
names = {}
for expression in request["expressions"]:
    lowered = ctypes.c_char_p()
    if nvrtc.nvrtcGetLoweredName(program, os.fsencode(expression), ctypes.byref(lowered)) == 0:
        names[expression] = lowered.value.decode()
ptx = text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
json.dump({"ptx": ptx.decode(errors="replace"), "names": names}, sys.stdout)
