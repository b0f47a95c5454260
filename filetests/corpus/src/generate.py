#!/usr/bin/env python3
"""Compiles the corpus: CUDA C++ with NVRTC, Triton kernels with Triton. No GPU is needed.

usage: generate.py cuda PATH/libnvrtc.so.13 PATH/include   (CUDA's headers, for mma.h)
       generate.py triton
"""
import ctypes
import importlib.util
import pathlib
import sys

SOURCES = pathlib.Path(__file__).resolve().parent
CORPUS = SOURCES.parent
TARGETS = ("80", "89")
HEADERS = ("mma.cuh", "hopper.cuh")


def targets(path, module=None):
    """Those of a source: Hopper's own instructions for sm_90a alone; a Triton source may name some."""
    return ("90a",) if path.stem.startswith("hopper_") else getattr(module, "TARGETS", TARGETS)


def nvrtc(library, include, path, sm):
    """PTX of one CUDA C++ file."""
    lib = ctypes.CDLL(library)
    program = ctypes.c_void_p()

    def check(status):
        if status:
            size = ctypes.c_size_t()
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            sys.exit(f"{path.name}: {log.value.decode()}")

    headers = (ctypes.c_char_p * len(HEADERS))(*((SOURCES / name).read_bytes() for name in HEADERS))
    names = (ctypes.c_char_p * len(HEADERS))(*(name.encode() for name in HEADERS))
    check(lib.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), len(HEADERS), headers, names))
    options = [f"--gpu-architecture=compute_{sm}".encode(), b"--std=c++17", f"--include-path={include}".encode()]
    check(lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)))
    size = ctypes.c_size_t()
    check(lib.nvrtcGetPTXSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    check(lib.nvrtcGetPTX(program, text))
    return text.value.decode()


def write(name, sm, text):
    """Writes a file, but no twin: the harness makes PTX for sm_89 that is equal but for its target."""
    twin = CORPUS / f"{name}_sm80.ptx"
    if sm == "89" and twin.exists() and twin.read_text().replace(".target sm_80", ".target sm_89") == text.rstrip() + "\n":
        return
    (CORPUS / f"{name}_sm{sm}.ptx").write_text(text.rstrip() + "\n")
    print(f"{name}_sm{sm}.ptx: {text.count(chr(10))} lines")


def cuda(library, include):
    for path in sorted(SOURCES.glob("*.cu")):
        # The harness makes the PTX of the large sources.
        for sm in targets(path) if path.stem not in ("flash", "matmul", "wmma_attention") else ():
            write(f"cuda_{path.stem}", sm, nvrtc(library, include, path, sm))


def without_debugging(text):
    """Drops directives that hold paths of the machine that compiled."""
    lines, kept = iter(text.splitlines()), []
    for line in lines:
        if line.lstrip().startswith(".section"):
            while "}" not in line:
                line = next(lines)
            continue
        if line.lstrip().startswith((".file", ".loc")):
            continue
        kept.append(line.rstrip())
    return "\n".join(kept).replace(", debug", "")


def triton():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for path in sorted(SOURCES.glob("*.py")):
        if path.name == "generate.py":
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for sm in targets(path, module):
            source = ASTSource(fn=module.kernel, signature=module.SIGNATURE, constexprs=module.CONSTANTS, attrs=module.ATTRIBUTES)
            compiled = triton.compile(source, target=GPUTarget("cuda", int(sm.rstrip("a")), 32), options=module.OPTIONS)
            write(f"triton_{path.stem}", sm, without_debugging(compiled.asm["ptx"]))
            print(f"  shared {compiled.metadata.shared}, scratch {compiled.metadata.global_scratch_size}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["cuda"] and len(sys.argv) == 4:
        cuda(*sys.argv[2:])
    elif sys.argv[1:] == ["triton"]:
        triton()
    else:
        sys.exit(__doc__)
