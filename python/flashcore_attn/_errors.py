"""The exceptions of FlashCore. Each is also a builtin exception that a caller would expect."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentError",
    "DTypeError",
    "DeviceError",
    "DeviceMemoryError",
    "FlashCoreError",
    "GroupError",
    "LedgerError",
    "UnsupportedError",
]


class FlashCoreError(Exception):
    """Base of every error that FlashCore raises."""


class ArgumentError(FlashCoreError, ValueError):
    """A value that no attention could accept: shapes that do not fit, a scale that is not finite."""


def invalid(argument: str, value: object, expected: str) -> ArgumentError:
    """The error for a value that an argument cannot have."""
    return ArgumentError(invalid_words(argument, value, expected))


def invalid_words(argument: str, value: Any, expected: str) -> str:
    """The message of such an error. Long values are cut."""
    if (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) >> 128
    ):  # Python refuses to print very long integers
        text = f"an integer of {value.bit_length()} bits"
    else:
        try:
            text = " ".join(str(value).split())
        except Exception:  # a value that cannot be printed, as a tensor without memory
            text = f"a {type(value).__name__}"
    text = text if len(text) <= 80 else f"{text[:80]}…"
    return f"invalid value '{text}' for {argument}: expected {expected}"


def dimensions(number: int) -> str:
    """So many dimensions, in words."""
    return "1 dimension" if number == 1 else f"{number} dimensions"


class DTypeError(FlashCoreError, TypeError):
    """An element type other than float16, bfloat16 and float32, or types that differ."""


class UnsupportedError(FlashCoreError, NotImplementedError):
    """A feature, device or combination that is not supported (yet). ``flashcore_attn.compat`` falls back on it.

    ``reason`` is the short form that :func:`flashcore_attn.compat.stats` counts.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message.partition(";")[0]


class DeviceError(FlashCoreError, RuntimeError):
    """An error of the GPU or its driver: the driver is too old, no memory, no permission."""


class DeviceMemoryError(DeviceError, MemoryError):
    """No memory left on the GPU."""


class GroupError(FlashCoreError, RuntimeError):
    """A process group failed: another rank ended, or did not answer within the time-out."""


class LedgerError(FlashCoreError, OSError):
    """The ledger cannot be read or written: missing, newer, damaged, locked, or the disk is full."""
