"""Dropout: its probability, the state of its generator, and its mask."""

from __future__ import annotations

from typing import Any

from . import _features
from ._errors import DTypeError, invalid, invalid_words

__all__ = ["Stated", "check_state", "mask", "probability", "with_dropout"]

_WORD = 2**32 - 1


class Stated(float):
    """A probability with the state of the generator, which is drawn otherwise."""

    state: Any

    def __new__(cls, p: float, state: Any) -> Stated:
        made = super().__new__(cls, p)
        made.state = state
        return made


def probability(value: Any) -> float:
    """``dropout_p`` as a float from 0 to 1."""
    p = -1.0
    if hasattr(value, "__float__") and not isinstance(value, str):
        try:
            p = value if isinstance(value, float) else float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # of arrays
            p = -1.0
    if not 0.0 <= p <= 1.0:
        raise invalid("dropout_p", value, "a number from 0 to 1")
    return p


def with_dropout(features: Any, backend: Any, q: Any, p: float) -> Any:
    """The features of a call with dropout. A call without a stated generator draws from the default one of q's device,
    so that checkpoints and CUDA graphs repeat or advance the mask as they do that of PyTorch's dropout."""
    state = p.state if isinstance(p, Stated) else backend.draw_rng_state(q)
    return (features or _features.Features())._replace(dropout_p=float(p), rng_state=state)


def check_state(state: Any, dtype: Any) -> None:
    """Rejects what is no state of the generator: four words."""
    if state.dtype != dtype:
        raise DTypeError(invalid_words("the dtype of rng_state", state.dtype, str(dtype)))
    if tuple(state.shape) != (4,):
        raise invalid("the shape of rng_state", tuple(state.shape), "(4,)")


def mask(features: Any, shape: tuple[int, int, int, int], numbers: Any, choose: Any) -> Any:
    """1 where a weight of ``(batch, heads, seqlen_q, seqlen_k)`` is kept, and -1 where it is dropped.

    ``numbers`` makes an array of the integers below a bound, in 64 bits; ``choose`` is ``where``. The words of the
    generator are those that the kernels compute (crates/problem/src/dropout.rs).
    """
    batch, heads, rows, keys = shape
    p = features.dropout_p
    threshold = min(int(p * 2**16 + 0.5), 2**16 - (p < 1.0))
    words = features.rng_state + 0 * numbers(4) & _WORD  # of 64 bits
    key = [words[0], words[1] ^ words[3]]
    i, j = numbers(rows)[:, None], numbers(keys)
    none = 0 * (i + j)
    head = numbers(batch * heads).reshape(batch, heads, 1, 1)
    counter = [j // 32 * 8 + j % 8 + none, i // 16 * 8 + i % 8 + none, head + none, words[2] + none]
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57  # modulo 2^64
        high = [(x >> 32) & _WORD for x in (a, b)]
        counter = [high[1] ^ counter[1] ^ key[0], b & _WORD, high[0] ^ counter[3] ^ key[1], a & _WORD]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    first, second = (choose(j // 16 % 2 == 1, counter[n + 1], counter[n]) for n in (0, 2))
    word = choose(i // 8 % 2 == 1, second, first)
    number = choose(j // 8 % 2 == 1, word >> 16, word & 0xFFFF)
    return choose(number >= threshold, 1 + 0 * number, -1 + 0 * number)
