"""Problems as the command line, the rows and Rust state them."""

from __future__ import annotations

from typing import NamedTuple

OURS = "flashcore"  # the name that rows give to our own kernels, and to nobody else

ACCEPTED = (
    "BATCH,HEADS,SEQ,DIM,DTYPE[,MASK] as in 1,8,512,64,f16; HEADS may be QUERY/KEY heads as in 32/8, "
    "SEQ may be QUERIESxKEYS as in 1x8192, DTYPE is f16 or bf16, MASK is causal or causal-top-left"
)


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
            (mask,) = parts[5:] or ["none"]
            if mask not in ("causal", "causal-top-left") and len(parts) > 5:
                raise ValueError(mask)
            if dtype not in ("f16", "bf16"):
                raise ValueError(dtype)
            keys, positions = int(heads_kv or heads_q), int(seq_kv or seq_q)
            return Problem(int(batch), int(heads_q), keys, int(seq_q), positions, int(dim), dtype, mask)
        except ValueError:
            raise ValueError(f'problem "{text}" is not understood; accepted: {ACCEPTED}') from None

    @property
    def stated(self) -> tuple[tuple[int, int, int, int, int, int], str, str]:
        """As Rust takes it."""
        return self[:6], self.dtype, self.mask

    @property
    def causal(self) -> bool:
        """Whether keys are masked."""
        return self.mask != "none"

    def masked_as(self, causal: str) -> bool:
        """Whether the problem's mask, if it has one, is this causal one: the two are one where lengths are equal."""
        return self.mask in ("none", causal) or self.seq_q == self.seq_kv

    def __str__(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        seq = f"{self.seq_q}" if self.seq_q == self.seq_kv else f"{self.seq_q}x{self.seq_kv}"
        mask = f" {self.mask}" if self.causal else ""
        return f"B{self.batch} H{heads} S{seq} D{self.head_dim} {self.dtype}{mask}"
