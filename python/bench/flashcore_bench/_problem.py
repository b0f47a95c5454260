"""Problems as the command line, the rows and Rust state them."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from flashcore_attn._errors import invalid

OURS = "flashcore"  # the name in rows that is reserved for FlashCore's kernels
RANDOM = "random"  # the suite of problems that a seed draws
RANDOM_BACKWARD = "random-backward"  # the gradients of such problems
RANDOM_CPU, ROWS_CPU = "random-cpu", "rows-cpu"  # random calls on the CPU, and those of few query rows
#: Suites that are raced on a CPU.
ON_CPU = ("features", RANDOM_CPU, ROWS_CPU)
#: Suites whose problems a seed draws.
DRAWN = (RANDOM, RANDOM_BACKWARD, RANDOM_CPU, ROWS_CPU)

EXPECTED = (
    "BATCH,HEADS,SEQ,DIM,DTYPE[,MASK][,softcap:CAP] as in 1,8,512,64,f16; HEADS may be QUERY/KEY heads as in 32/8, "
    "SEQ may be QUERIESxKEYS as in 1x8192, DTYPE is f16, bf16, f32, tf32 (f32 multiplied in tf32), e4m3 or e5m2, "
    "MASK is causal, causal-top-left, or a sliding window, window:BEFORE:AFTER or window-top-left:BEFORE:AFTER, of "
    "keys before and after the query's own (inf for all)"
)


FP8 = ("e4m3", "e5m2")  # their output is bf16

_CAP = "softcap:"
_MASK = re.compile(r"causal(-top-left)?|window(-top-left)?(:([0-9]+|inf)){2}")


class Problem(NamedTuple):
    """What to compute, with the field names of the rows."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    dtype: str
    mask: str
    softcap: float | None = None

    @staticmethod
    def parse(text: str) -> Problem:
        """``1,32/8,1x8192,128,bf16,causal``.

        Raises:
            ValueError: with what is accepted.
        """
        parts = text.split(",")
        try:
            batch, heads, seq, dim, dtype = parts[:5]
            heads_q, _, heads_kv = heads.partition("/")
            seq_q, _, seq_kv = seq.partition("x")
            words = parts[5:]
            softcap = float(words.pop()[len(_CAP) :]) if words and words[-1].startswith(_CAP) else None
            (mask,) = words or ["none"]
            if words and not _MASK.fullmatch(mask):
                raise ValueError(mask)
            if softcap is not None and not 0 < softcap < math.inf:
                raise ValueError(softcap)
            if dtype not in ("f16", "bf16", "f32", "tf32", *FP8):
                raise ValueError(dtype)
            keys, positions = int(heads_kv or heads_q), int(seq_kv or seq_q)
            return Problem(int(batch), int(heads_q), keys, int(seq_q), positions, int(dim), dtype, mask, softcap)
        except ValueError:
            raise invalid("problem", text, EXPECTED) from None

    @property
    def stated(self) -> tuple[tuple[int, int, int, int, int, int], str, str, float | None]:
        """As Rust takes it."""
        return self[:6], self.dtype, self.mask, self.softcap

    @property
    def causal(self) -> bool:
        """Whether the mask is a causal one, without a window."""
        return self.mask.startswith("causal")

    @property
    def window(self) -> tuple[int, int] | None:
        """Keys before and after the query's own that it sees, -1 for all; ``None`` without a window."""
        if not self.mask.startswith("window"):
            return None
        before, after = (-1 if keys == "inf" else int(keys) for keys in self.mask.split(":")[1:])
        return before, after

    def aligned_as(self, causal: str) -> bool:
        """Whether the mask, if there is one, has the alignment of this causal mask. Equal lengths have both."""
        top_left = "top-left" in self.mask
        return self.mask == "none" or self.seq_q == self.seq_kv or top_left == ("top-left" in causal)

    def __str__(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        seq = f"{self.seq_q}" if self.seq_q == self.seq_kv else f"{self.seq_q}x{self.seq_kv}"
        mask = "" if self.mask == "none" else f" {self.mask}"
        softcap = "" if self.softcap is None else f" softcap {self.softcap:g}"
        return f"B{self.batch} H{heads} S{seq} D{self.head_dim} {self.dtype}{mask}{softcap}"
