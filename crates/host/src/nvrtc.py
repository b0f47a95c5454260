"""Compiles CUDA C++ to PTX with NVRTC: nvrtc.py LIBRARY ARCH NAME [INCLUDE …] < source > ptx.

Exit 1: the source is wrong; 2: no NVRTC."""

import ctypes
import os
import sys

try:
    nvrtc = ctypes.CDLL(sys.argv[1])
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(2)

program = ctypes.c_void_p()
source = sys.stdin.buffer.read()
if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, os.fsencode(sys.argv[3]), 0, None, None) != 0:
    print("nvrtcCreateProgram failed", file=sys.stderr)
    sys.exit(2)


def text(size_of, get):
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    get(program, buffer)
    return buffer.value


options = [f"--gpu-architecture={sys.argv[2]}".encode(), b"--std=c++17", b"-default-device", b"-lineinfo"]
options += [b"--include-path=" + os.fsencode(path) for path in sys.argv[4:]]
failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)) != 0
log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
sys.stderr.buffer.write(log)
if failed:
    sys.exit(1)
sys.stdout.buffer.write(text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX))
