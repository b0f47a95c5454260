#!/usr/bin/env python3
"""Compiles the Triton kernels of the corpus. No GPU is needed. The harness compiles CUDA C++ when tests run."""
import importlib.util
import pathlib
import re

SOURCES = pathlib.Path(__file__).resolve().parent
CORPUS = SOURCES.parent
TARGETS = ("80", "89")


def write(name, sm, text):
    """Writes a file, but no twin: of PTX for sm_89 that differs from PTX for sm_80 in the order of instructions at
    most, the harness tests the latter with the other target."""
    twin = CORPUS / f"{name}_sm80.ptx"
    if sm == "89" and twin.exists() and instructions(twin.read_text()) == instructions(text):
        return
    (CORPUS / f"{name}_sm{sm}.ptx").write_text(text.rstrip() + "\n")
    print(f"{name}_sm{sm}.ptx: {text.count(chr(10))} lines")


def instructions(text):
    """The names of all instructions, sorted."""
    return sorted(re.findall(r"^\t(?:@!?%p\d+ )?\s*([a-z][\w.:]*)", text, re.MULTILINE))


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
        for sm in getattr(module, "TARGETS", TARGETS):
            source = ASTSource(fn=module.kernel, signature=module.SIGNATURE, constexprs=module.CONSTANTS, attrs=module.ATTRIBUTES)
            compiled = triton.compile(source, target=GPUTarget("cuda", int(sm.rstrip("a")), 32), options=module.OPTIONS)
            write(f"triton_{path.stem}", sm, without_debugging(compiled.asm["ptx"]))
            print(f"  shared {compiled.metadata.shared}, scratch {compiled.metadata.global_scratch_size}")


if __name__ == "__main__":
    triton()
