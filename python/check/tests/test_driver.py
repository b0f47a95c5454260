"""Launches as a driver sees them: addresses of parameters, tensor maps and functions by name."""

from __future__ import annotations

import ctypes
import platform
import struct

import numpy as np
import pytest
from flashcore_check import _cute, _driver, _session, _standin, _uninitialised

COPY = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry other(.param .u32 n)
{
    ret;
}
.visible .entry copy(
    .param .align 8 .b8 tensors[24],
    .param .u32 n
)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<8>;
    .reg .pred %p<2>;
    mov.u32 %r0, %tid.x;
    ld.param.u32 %r1, [n];
    setp.ge.u32 %p0, %r0, %r1;
    @%p0 ret;
    ld.param.u64 %rd0, [tensors];
    ld.param.u64 %rd1, [tensors+8];
    mul.wide.u32 %rd2, %r0, 4;
    add.s64 %rd3, %rd0, %rd2;
    add.s64 %rd4, %rd1, %rd2;
    ld.global.u32 %r2, [%rd3];
    ld.param.u32 %r3, [tensors+20];
    add.u32 %r2, %r2, %r3;
    st.global.u32 [%rd4], %r2;
    ret;
}
"""


def test_a_function_has_the_parameters_of_its_entry() -> None:
    function = _driver.Function.of(COPY, "copy")
    assert function is not None and function.parameters == ((24, True), (4, False))
    assert _driver.Function.of(COPY, "cop") is None


def test_a_struct_with_addresses(session: _session.Session) -> None:
    torch = pytest.importorskip("torch")
    x, out = torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for tensor in (x, out):
        _uninitialised.note_asked(tensor)
    struct = np.array([x.data_ptr(), out.data_ptr(), 7 << 32], np.uint64)
    number = np.array([3], np.int32)
    function = _driver.Function.of(COPY, "copy")
    assert function is not None
    pointers = [struct.ctypes.data, number.ctypes.data]
    _driver.run(function, _driver.Grid((1, 1, 1), (32, 1, 1)), pointers)
    assert out.tolist() == [7, 8, 9, 0]
    assert session.launches[-1].verdict == "passed"


def test_a_tensor_map_is_read_from_its_bytes() -> None:
    """The words of the CuTe DSL for a box of 64 by 64 of a matrix of 300 by 200 halves in rows of 512 bytes."""
    words = [0x560F20CBE600, 0x2000246312, 0, 0, 0x12B000000C7, 0, 0x3F << 56, 0x3F]
    data = struct.pack("<8Q", *words) + bytes(64)
    found = _driver.TensorMap.of(data)
    assert found == _driver.TensorMap(0x560F20CBE600, "f16", "128", (200, 300), (512,), (64, 64))
    assert _driver.TensorMap.of(struct.pack("<8Q", 0x560F20CBE600, 0, *words[2:]) + bytes(64)) is None


def test_a_tensor_map_of_sequences_of_any_length() -> None:
    """Rows of 128 halves counted from the end of a dimension of 2^30, and from the beginning of another one."""
    found = _driver.TensorMap(0x1000 - (128 << 30), "f16", "128", (64, 1 << 30, 2**31 - 1), (128, 128), (64, 64, 1))
    assert list(found.shifts()) == [0, 128 << 30, 128 * (2**31 - 1)]
    described = found.described({"index": 2, "offset": 32}, 128 << 30)
    assert (described["offset"], described["wraps"]) == (2**64 + 32 - (128 << 30), True)


def test_a_stand_in_for_a_library() -> None:
    if platform.machine() not in ("x86_64", "aarch64"):
        with pytest.raises(_standin.UnsupportedMachine, match=platform.machine()):
            _standin.library_image({"add_one": 0})
        return
    of_int = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
    made = _standin.Library({"add_one": of_int(lambda x: x + 1), "twice": of_int(lambda x: 2 * x)})
    library = ctypes.CDLL(str(made.path))
    assert (library.add_one(4), library.twice(21)) == (5, 42)
    with pytest.raises(AttributeError):
        getattr(library, "add")  # noqa: B009


def test_another_machine_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(_standin.UnsupportedMachine, match="on Linux on x86_64 and aarch64, not on riscv64"):
        _standin.library_image({"add_one": 0})


def test_versions_of_the_cute_dsl() -> None:
    assert _cute.support("4.8.1") is None
    assert "5.0.0 was not tried" in str(_cute.support("5.0.0"))
    with pytest.raises(_cute.UnsupportedCute, match="nvidia-cutlass-dsl 4.2.0 is not supported: expected 4.8"):
        _cute.support("4.2.0")
