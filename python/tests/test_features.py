"""Lengths, sinks, slopes, masks and functions for scores and masks, for every kind of tensor, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import TOLERANCE, Tensors, every_kind, reference

import flashcore_attn
from flashcore_attn import _trace_cache

DTYPES = ["float32", "float16", "bfloat16"]


def exact(q, k, v, seen=True, bias=0.0, sink=None, scale=None, score=None):
    """The definition in float64, of ``(heads, sequence, dim)``: O and the log-sum-exp."""
    group = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    s = q @ k.swapaxes(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s + bias if score is None else score(s)
    s = np.where(np.broadcast_to(seen, s.shape), s, -np.inf)
    own = np.full(s.shape[:2], -np.inf) if sink is None else np.broadcast_to(sink[:, None], s.shape[:2])
    peak = np.maximum(s.max(-1, initial=-np.inf), own)
    shift = np.where(np.isfinite(peak), peak, 0.0)
    weights, of_sink = np.exp(s - shift[..., None]), np.exp(own - shift)
    mass = weights.sum(-1) + of_sink
    with np.errstate(divide="ignore"):
        lse = np.log(mass) + shift
    return weights @ v / np.where(mass == 0, 1, mass)[..., None], lse


def distance(rows, keys):
    """``i + keys - rows - j``."""
    return np.arange(rows)[:, None] + keys - rows - np.arange(keys)


def close(tensors, ours, theirs, dtype, what=""):
    worst = np.abs(tensors.array(ours) - theirs).max(initial=0)
    assert worst <= TOLERANCE[dtype], (what, worst)


def close_lse(tensors, ours, theirs, what=""):
    atol = 2e-3 if tensors.kind == "cuda" else 3e-5
    np.testing.assert_allclose(tensors.array(ours), theirs, atol=atol, rtol=1e-5, err_msg=str(what))


def per_batch(tensors, q, k, v, **options):
    """``exact`` of each batch entry of ``(batch, sequence, heads, dim)`` tensors, and its log-sum-exp."""
    arrays = [tensors.array(x).swapaxes(1, 2) for x in (q, k, v)]
    results = [
        exact(
            *(x[b] for x in arrays),
            **{name: f(b) if callable(f) and name != "score" else f for name, f in options.items()},
        )
        for b in range(len(arrays[0]))
    ]
    return np.stack([out.swapaxes(0, 1) for out, _ in results]), np.stack([lse for _, lse in results])


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_slopes(tensors, dtype, causal):
    q, k, v = tensors.three(37, 53, 4, 2, 32, dtype)
    far = distance(37, 53)
    for shape in [(4,), (2, 4)]:
        slopes = tensors.of(np.random.default_rng(7).random(shape) / 8, "float32")
        values = np.broadcast_to(tensors.array(slopes), (2, 4))
        out, lse, _ = flashcore_attn.flash_attn_func(
            q, k, v, causal=causal, alibi_slopes=slopes, return_attn_probs=True
        )
        theirs, their_lse = per_batch(
            tensors, q, k, v, seen=far >= 0 if causal else True,
            bias=lambda b, values=values: -values[b][:, None, None] * abs(far),
        )  # fmt: skip
        close(tensors, out, theirs, dtype)
        close_lse(tensors, lse, their_lse)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(tensors, dtype):
    q, k, v = tensors.three(40, 23, 4, 2, 32, dtype)
    sink = tensors.draw((4,), "float32", 8)
    far = distance(40, 23)
    out, lse, _ = flashcore_attn.flash_attn_func(
        q, k, v, window_size=(5, 0), learnable_sink=sink, return_attn_probs=True
    )
    seen = (far >= 0) & (far <= 5)
    theirs, their_lse = per_batch(tensors, q, k, v, seen=seen, sink=tensors.array(sink))
    close(tensors, out, theirs, dtype)
    close_lse(tensors, lse, their_lse)
    blind = ~seen.any(1)
    assert blind.any() and not tensors.array(out)[:, blind].any()
    expected = np.broadcast_to(tensors.array(sink)[:, None], (2, 4, blind.sum()))
    np.testing.assert_allclose(tensors.array(lse)[..., blind], expected, rtol=1e-6)


@every_kind
def test_chunks(tensors):
    q, k, v = tensors.three(37, 53, 2, 2, 32, "float16")
    out = flashcore_attn.flash_attn_func(q, k, v, causal=True, attention_chunk=8)
    own = np.arange(37)[:, None] + 16
    seen = (own // 8 == np.arange(53) // 8) & (np.arange(53) <= own)
    close(tensors, out, per_batch(tensors, q, k, v, seen=seen)[0], "float16")


LENGTHS = [(1, 7), (0, 5), (40, 40), (3, 0), (17, 90), (64, 33)]


def packed(tensors, lengths, heads, heads_k, dim, dtype):
    """q, k and v of sequences one after the other, and where each begins."""
    rows, keys = (np.concatenate([[0], np.cumsum(side)]).astype(np.int32) for side in zip(*lengths))
    q = tensors.draw((int(rows[-1]), heads, dim), dtype, 1)
    k, v = (tensors.draw((int(keys[-1]), heads_k, dim), dtype, seed) for seed in (2, 3))
    return (q, k, v), rows, keys


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(tensors, dtype, causal):
    (q, k, v), rows, keys = packed(tensors, LENGTHS, 4, 2, 32, dtype)
    starts = tensors.of(rows, "int32"), tensors.of(keys, "int32")
    sink = tensors.draw((4,), "float32", 4)
    slopes = tensors.of(np.random.default_rng(5).random((6, 4)) / 8, "float32")
    for options in [{}, {"softcap": 2.0}, {"alibi_slopes": slopes}, {"learnable_sink": sink}, {"window_size": (9, 3)}]:
        out, lse = flashcore_attn.flash_attn_varlen_func(
            q, k, v, *starts, 64, 90, causal=causal, return_lse=True, **options
        )
        assert out.shape == q.shape and out.dtype == q.dtype and lse.shape == (4, q.shape[0])
        alone = flashcore_attn.flash_attn_varlen_func(q, k, v, *starts, 64, 90, causal=causal, **options)
        for b, (length_q, length_k) in enumerate(LENGTHS):
            mine = slice(rows[b], rows[b + 1])
            parts = [tensors.array(x)[first : first + n].swapaxes(0, 1) for x, first, n in (
                (q, rows[b], length_q), (k, keys[b], length_k), (v, keys[b], length_k))]  # fmt: skip
            far = distance(length_q, length_k)
            seen = far >= 0 if causal else np.ones(far.shape, bool)
            if "window_size" in options:
                seen = (far <= 9) & (far >= (0 if causal else -3))
            theirs, their_lse = exact(
                *parts,
                seen=seen,
                bias=-tensors.array(slopes)[b][:, None, None] * abs(far) if "alibi_slopes" in options else 0.0,
                sink=tensors.array(sink) if "learnable_sink" in options else None,
                score=(lambda s: 2 * np.tanh(s / 2)) if "softcap" in options else None,
            )
            for result in (out, alone):
                close(tensors, result[mine], theirs.swapaxes(0, 1), dtype, (options, b))
            close_lse(tensors, lse[:, mine], their_lse, (options, b))


@every_kind
def test_packed_functions_read_the_parts(tensors):
    qkv = tensors.draw((60, 3, 4, 16), "float16", 1)
    starts = tensors.of(np.array([0, 13, 60]), "int32")
    parts = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    whole = flashcore_attn.flash_attn_varlen_func(*parts, starts, starts, 47, 47, causal=True)
    of_qkv = flashcore_attn.flash_attn_varlen_qkvpacked_func(qkv, starts, 47, causal=True)
    of_kv = flashcore_attn.flash_attn_varlen_kvpacked_func(
        qkv[:, 0], qkv[:, 1:], starts, starts, 47, 47, causal=True, return_attn_probs=True
    )
    assert tensors.bits(whole) == tensors.bits(of_qkv)
    close(tensors, of_kv[0], tensors.array(whole), "float16")
    assert of_kv[1].shape == (4, 60) and of_kv[2] is None


@every_kind
def test_features_of_calls_without_rows(tensors):
    zeros = lambda *shape: tensors.of(np.zeros(shape), "float32")  # noqa: E731
    k = zeros(1, 5, 2, 16)
    out = flashcore_attn.flash_attn_func(zeros(1, 4, 0, 16), k, k, alibi_slopes=zeros(0))
    assert out.shape == (1, 4, 0, 16)
    out = flashcore_attn.flash_attn_func(zeros(0, 4, 2, 16), k[:0], k[:0], alibi_slopes=zeros(0, 2))
    assert out.shape == (0, 4, 2, 16)
    table, k = zeros(0) if tensors.kind != "numpy" else flashcore_attn.table(zeros(0)), zeros(1, 2, 5, 16)
    out = flashcore_attn.flex_attention(zeros(1, 0, 4, 16), k[:, :0], k[:, :0], lambda s, b, h, i, j: s + table[h])
    assert out.shape == (1, 0, 4, 16)
    out = flashcore_attn.flex_attention(zeros(1, 2, 0, 16), k, k, lambda s, b, h, i, j: s + table[i])
    assert out.shape == (1, 2, 0, 16)
    starts = tensors.of(np.array([0, 1, 4]), "int32")
    k = zeros(4, 2, 16)
    out = flashcore_attn.flash_attn_varlen_func(zeros(4, 0, 16), k, k, starts, starts, 3, 3)
    assert out.shape == (4, 0, 16)


@every_kind
def test_padding_beyond_the_used_rows(tensors):
    q, k, v = tensors.three(4, 9, 2, 2, 16, "float32", batch=2)
    used, padding = (tensors.of(np.array(x), "int32") for x in ([9, 3], [0, 6]))
    call = lambda: flashcore_attn.flash_attn_varlen_func(q, k, v, seqused_k=used, leftpad_k=padding)  # noqa: E731
    if tensors.kind == "cuda":  # lengths in device memory are cut
        assert not tensors.array(call())[1].any()
        return
    with pytest.raises(flashcore_attn.ArgumentError, match=r"'6' for leftpad_k\[1\]: expected 0 to 3, the rows"):
        call()


@every_kind
def test_used_lengths_and_left_padding(tensors):
    q, k, v = tensors.three(20, 33, 4, 2, 16, "float16", batch=3)
    used_q, used_k, padding = ([20, 7, 0], [33, 0, 21], [0, 0, 4])
    out, lse = flashcore_attn.flash_attn_varlen_func(
        q, k, v, seqused_q=tensors.of(np.array(used_q), "int32"), seqused_k=tensors.of(np.array(used_k), "int32"),
        leftpad_k=tensors.of(np.array(padding), "int32"), causal=True, return_lse=True,
    )  # fmt: skip
    assert out.shape == q.shape and lse.shape == (3, 4, 20)
    for b in range(3):
        rows, keys = used_q[b], slice(padding[b], used_k[b])
        parts = tensors.array(q)[b, :rows], tensors.array(k)[b, keys], tensors.array(v)[b, keys]
        seen = distance(rows, used_k[b] - padding[b]) >= 0
        theirs, their_lse = exact(*(x.swapaxes(0, 1) for x in parts), seen=seen)
        close(tensors, out[b, :rows], theirs.swapaxes(0, 1), "float16")
        close_lse(tensors, lse[b, :, :rows], their_lse)
        assert not tensors.array(out)[b, rows:].any() and np.isneginf(tensors.array(lse)[b, :, rows:]).all()


@pytest.mark.parametrize("tensors", ["numpy"], indirect=True)
def test_lengths_that_are_refused(tensors):
    (q, k, v), rows, keys = packed(tensors, [(3, 4), (5, 6)], 2, 2, 16, "float32")
    call = flashcore_attn.flash_attn_varlen_func
    for change, error, words in [
        (
            {"cu_seqlens_q": rows[::-1].copy()},
            ValueError,
            r"invalid value '3' for cu_seqlens_q\[1\]: expected at least",
        ),
        (
            {"cu_seqlens_k": keys + 1},
            ValueError,
            r"invalid value '11' for cu_seqlens_k\[2\]: expected 0 to 10, the rows",
        ),
        ({"cu_seqlens_q": rows.astype(np.int16)}, TypeError, "invalid value '.*int16' for the dtype of cu_seqlens_q"),
        (
            {"cu_seqlens_q": rows.astype(np.int64) + 2**40},
            ValueError,
            "for an element of cu_seqlens_q: expected an integer of 32 bits",
        ),
        (
            {"cu_seqlens_q": rows[:2]},
            ValueError,
            "cu_seqlens_k has 2 sequences, cu_seqlens_q has 1; the numbers must be equal",
        ),
        ({"seqused_k": rows}, ValueError, r"seqused_k has shape \(3,\); expected \(2,\)"),
        (
            {"seqused_k": np.array([9, 1], np.int32)},
            ValueError,
            r"invalid value '9' for seqused_k\[0\]: expected 0 to 6",
        ),
        ({"max_seqlen_q": 4}, ValueError, r"invalid value '8' for cu_seqlens_q\[2\]: expected at most 7"),
        ({"max_seqlen_q": -1}, ValueError, "invalid value '-1' for max_seqlen_q: expected an integer of 0 to 2"),
        ({"attention_chunk": 2**31}, ValueError, "for attention_chunk: expected an integer of 0 to 2"),
        ({"attention_chunk": -1}, ValueError, "for attention_chunk: expected an integer of 0 to 2"),
        ({"cu_seqlens_q": 5}, ValueError, "cu_seqlens_q is a int; expected a tensor"),
        ({"cu_seqlens_q": rows[:0]}, ValueError, r"cu_seqlens_q has shape \(0,\); expected \(batch \+ 1,\)"),
        ({"cu_seqlens_k": keys[None]}, ValueError, r"cu_seqlens_k has shape \(1, 3\); expected \(batch \+ 1,\)"),
        ({"learnable_sink": [0.0]}, ValueError, "learnable_sink is a list; expected"),
        ({"q": q[None]}, ValueError, "q has 4 dimensions; it takes 3: rows, heads, head_dim"),
        ({"block_table": rows}, ValueError, "k has 3 dimensions; it takes 4: batch, sequence, heads, head_dim"),
        ({"qv": rows}, NotImplementedError, "invalid value 'a ndarray' for qv: expected None"),
        ({"dropout_p": -0.5}, ValueError, "invalid value '-0.5' for dropout_p"),
        (
            {"alibi_slopes": np.ones(3)},
            ValueError,
            r"for the shape of alibi_slopes: expected \(2,\), or \(batch, heads\)",
        ),
    ]:
        arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": rows, "cu_seqlens_k": keys, "max_seqlen_q": 5}
        with pytest.raises(error, match=words):
            call(**{**arguments, "max_seqlen_k": 6, **change})


@every_kind
def test_no_sequence_and_no_row(tensors):
    q = tensors.draw((0, 2, 16), "float16", 1)
    starts = tensors.of(np.zeros(3), "int32")
    assert flashcore_attn.flash_attn_varlen_func(q, q, q, starts, starts, 0, 0).shape == (0, 2, 16)
    rows = tensors.draw((5, 2, 16), "float16", 1)
    some = tensors.of(np.array([0, 2, 5]), "int32")
    out, lse = flashcore_attn.flash_attn_varlen_func(rows, q, q, some, starts, 3, 0, return_lse=True)
    assert not tensors.array(out).any() and np.isneginf(tensors.array(lse)).all()


MASKS = [(2, 4, 37, 53), (1, 4, 37, 53), (2, 1, 1, 53), (37, 53), (53,), (1, 1, 37, 1), (4, 1, 53), (1, 1, 1, 1)]


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(tensors, dtype, shape):
    q, k, v = (x.swapaxes(1, 2) for x in tensors.three(37, 53, 4, 2, 32, dtype))
    shown = np.random.default_rng(3).random(shape) > 0.4
    flipped = [x.swapaxes(1, 2) for x in (q, k, v)]
    wide = np.broadcast_to(shown, (2, 4, 37, 53))
    call = flashcore_attn.scaled_dot_product_attention
    theirs, _ = per_batch(tensors, *flipped, seen=lambda b: wide[b])
    out = call(q, k, v, attn_mask=tensors.of(shown, "bool"), enable_gqa=True)
    close(tensors, out.swapaxes(1, 2), theirs, dtype)
    additive = tensors.of(np.where(shown, np.random.default_rng(4).standard_normal(shape), -np.inf), dtype)
    bias = np.broadcast_to(tensors.array(additive), (2, 4, 37, 53))
    theirs, _ = per_batch(tensors, *flipped, bias=lambda b: bias[b])
    close(tensors, call(q, k, v, attn_mask=additive, enable_gqa=True).swapaxes(1, 2), theirs, dtype)


@every_kind
def test_masks_with_leading_dimensions_that_broadcast(tensors):
    dtype = "float16" if tensors.kind == "cuda" else "float32"
    q, k = tensors.draw((3, 1, 4, 10, 16), dtype, 1), tensors.draw((2, 4, 12, 16), dtype, 2)
    shown = np.random.default_rng(5).random((2, 1, 10, 12)) > 0.3
    out = tensors.array(flashcore_attn.scaled_dot_product_attention(q, k, k, attn_mask=tensors.of(shown, "bool")))
    assert out.shape == (3, 2, 4, 10, 16)
    for i, j in np.ndindex(3, 2):
        theirs, _ = exact(tensors.array(q)[i, 0], tensors.array(k)[j], tensors.array(k)[j], seen=shown[j])
        assert np.abs(out[i, j] - theirs).max() < TOLERANCE[dtype]


def flex_cases(table, where, minimum):
    """Score and mask functions in the operators that NumPy and PyTorch share, and what they are in float64."""
    bias, slopes, documents = table["bias"], table["slopes"], table["documents"]
    half = 0.5

    def relative(score, b, h, q, k):
        return score + bias[h, q - k + 52]

    def mixed(score, b, h, q, k):
        return where(q >= k, score * half, score - (k - q) / 8) + slopes[h] * abs(q - k) ** 2 * 0.01

    def document(b, h, q, k):
        return (documents[b, q] == documents[b, k]) & (minimum(q, k) >= 1)

    def pattern(b, h, q, k):
        return ((q // 3 == k // 3) | ((k - q) % 5 == 0) | ~(q > k + h)) & ((q << 1) >= (k >> 1))

    return [(relative, None), (mixed, document), (None, pattern), (relative, pattern), (None, document)]


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(5))
def test_functions(tensors, dtype, case):
    q, k, v = (x.swapaxes(1, 2) for x in tensors.three(37, 53, 4, 2, 32, dtype))
    own = {
        "bias": tensors.draw((4, 120), "float32", 4),
        "slopes": tensors.draw((4,), "float32", 5),
        "documents": tensors.of(np.random.default_rng(6).integers(0, 3, (2, 53)), "int64"),
    }
    arrays = {name: tensors.array(x) for name, x in own.items()}
    arrays["documents"] = arrays["documents"].astype(int)
    if tensors.kind == "numpy":
        own = {name: flashcore_attn.table(x) for name, x in own.items()}
        functions = flex_cases(own, np.where, np.minimum)
    else:
        import torch

        functions = flex_cases(own, torch.where, torch.minimum)
    score_mod, mask_mod = functions[case]
    of_score, of_mask = flex_cases(arrays, np.where, np.minimum)[case]
    out, lse = flashcore_attn.flex_attention(
        q, k, v, score_mod, mask_mod, enable_gqa=True, return_lse=True
    )  # fmt: skip
    h, i, j = np.ogrid[:4, :37, :53]
    for b in range(2):
        seen = True if of_mask is None else of_mask(b, h, i, j)
        parts = [tensors.array(x)[b] for x in (q, k, v)]
        score = None if of_score is None else (lambda s, b=b: of_score(s, b, h, i, j))
        theirs, their_lse = exact(*parts, seen=seen, score=score)
        worst = np.abs(tensors.array(out)[b] - theirs).max()
        assert worst <= TOLERANCE[dtype] * 2, worst
        close_lse(tensors, lse[b], their_lse)


def test_a_captured_value_that_changes_is_seen():
    tensors = Tensors("numpy")
    q, k, v = (x.swapaxes(1, 2) for x in tensors.three(8, 9, 2, 2, 16, "float32"))
    shift, offsets = [1.0], np.zeros(9, np.float32)
    table = flashcore_attn.table(offsets)

    def score(s, b, h, q, k):
        return s * shift[0] + table[k]

    def out():
        return flashcore_attn.flex_attention(q, k, v, score)

    first = out()
    assert (out() == first).all()
    shift[0] = 2.0
    second = out()
    assert np.abs(second - first).max() > 1e-3
    offsets[3] = 5.0
    assert np.abs(out() - second).max() > 1e-3


def branch(score, b, h, q, k):
    if q > k:
        return score
    return -score


def test_what_no_program_can_state_is_refused_with_its_line():
    x = np.ones((1, 1, 4, 8), np.float32)
    line = branch.__code__.co_firstlineno + 1
    with pytest.raises(
        flashcore_attn.UnsupportedError, match=rf"test_features.py:{line}: a branch on a score or a position"
    ):
        flashcore_attn.flex_attention(x, x, x, branch)
    for function, words in [
        (lambda s, b, h, q, k: np.arcsin(s), "the function arcsin cannot be part of a program"),
        (lambda s, b, h, q, k: s + max(q, k), "a branch on a score"),
        (lambda s, b, h, q, k: s + x, r"an array of shape \(1, 1, 4, 8\) as a number"),
        (lambda s, b, h, q, k: s + math.floor(q / 2), "a Python number of a score|the attribute|cannot be part"),
        (lambda s, b, h, q, k: s + 2**40, "the integer 1099511627776 cannot be part of a program"),
        (lambda s, b, h, q, k: flashcore_attn.table(x)[0, q] + s, r"a row of shape \(4, 8\) of an array"),
        (lambda s, b, h, q, k: s & 1, "& of floating-point numbers"),
    ]:
        with pytest.raises((flashcore_attn.UnsupportedError, TypeError), match=words):
            flashcore_attn.flex_attention(x, x, x, function)
    with pytest.raises(
        flashcore_attn.ArgumentError, match="invalid value 'int' for the type of score_mod: expected a function"
    ):
        flashcore_attn.flex_attention(x, x, x, 3)
    short = flashcore_attn.table(np.ones(3, np.float32))
    with pytest.raises(
        flashcore_attn.ArgumentError, match="it reads t0 at 0 to 3 in dimension 0, which has 3 elements"
    ):
        flashcore_attn.flex_attention(x, x, x, lambda s, b, h, q, k: s + short[k])


def test_a_function_is_traced_once():
    _trace_cache._known.clear()  # the programs of other tests may fill it
    x = np.ones((1, 1, 4, 8), np.float32)
    calls = []

    def make(factor):
        def score(s, b, h, q, k):
            return s * factor

        return score

    def counting(s, b, h, q, k):
        calls.append(1)
        return s

    first = make(2.0)
    flashcore_attn.flex_attention(x, x, x, first)
    known = len(_trace_cache._known)
    flashcore_attn.flex_attention(x, x, x, make(2.0))
    assert len(_trace_cache._known) == known, "what a function consists of counts, not the object"
    flashcore_attn.flex_attention(x, x, x, make(3.0))
    assert len(_trace_cache._known) == known + 1
    flashcore_attn.flex_attention(x, x, x, counting)
    flashcore_attn.flex_attention(x, x, x, counting)
    assert len(calls) == 2, "a list may change between calls"


@every_kind
def test_captured_integers_of_more_than_32_bits_are_refused(tensors):
    q = k = v = tensors.draw((1, 2, 4, 16), "float32", 0)
    array = np.array([2**31 - 1, -(2**31), 1])
    held = tensors.of(array, "int64")
    table = flashcore_attn.table(held)
    run = lambda: flashcore_attn.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h])  # noqa: E731
    run()
    for value in (2**31, -(2**31) - 1, 2**32 + 7):
        held[1] = value
        with pytest.raises(flashcore_attn.ArgumentError, match=f"'{value}' for an element of a captured tensor"):
            run()


@every_kind
def test_rows_of_no_packed_sequence_are_zero(tensors, monkeypatch):
    if tensors.kind == "cuda":
        pytest.skip("a GPU does not write these rows")
    q, k, v = (tensors.draw((9, 2, 16), "float32", seed) for seed in range(3))
    starts = tensors.of(np.array([1, 3, 7], np.int32), "int32")
    if tensors.kind == "numpy":
        monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, np.nan, dtype))
        run = flashcore_attn.flash_attn_varlen_func
    else:
        import torch

        def run(*arguments, **options):
            torch.use_deterministic_algorithms(True)  # fills new memory with NaN
            try:
                return flashcore_attn.flash_attn_varlen_func(*arguments, **options)
            finally:
                torch.use_deterministic_algorithms(False)

    out, lse, _ = run(q, k, v, starts, starts, return_attn_probs=True)
    out, lse = tensors.array(out), tensors.array(lse)
    assert np.isfinite(out).all() and np.isfinite(lse[:, 1:7]).all()
    assert not out[[0, 7, 8]].any() and (lse[:, [0, 7, 8]] == -np.inf).all()


def test_arguments_of_other_types_are_named():
    with pytest.raises(flashcore_attn.ArgumentError, match="'list' for the type of array"):
        flashcore_attn.table([1.0, 2.0])
    with pytest.raises(flashcore_attn.ArgumentError, match="'NoneType' for the type of tensors"):
        flashcore_attn.block_sparse_mask(None, None, (16, 16))
    x = np.zeros((1, 8, 2, 16), np.float32)
    assert (flashcore_attn.flash_attn_func(x, x, x, attention_chunk=np.int64(4)) == 0).all()


@every_kind
def test_the_log_sum_exp_as_flashattention_4_returns_it(tensors):
    q, k, v = tensors.three(3, 5, 4, 2, 16, "float32")
    out, lse = flashcore_attn.flash_attn_func(q, k, v, return_lse=True)
    expected, expected_lse, _ = flashcore_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert tensors.bits(out) == tensors.bits(expected) and tensors.bits(lse) == tensors.bits(expected_lse)
    assert len(flashcore_attn.flash_attn_func(q, k, v, return_attn_probs=True, return_lse=True)) == 3


def test_flags_of_other_values_are_named():
    x = np.zeros((1, 8, 2, 16), np.float32)
    rows, starts = x[0], np.array([0, 8], np.int32)
    calls = {
        "return_attn_probs": lambda value: flashcore_attn.flash_attn_func(x, x, x, return_attn_probs=value),
        "return_lse": lambda value: flashcore_attn.flex_attention(x, x, x, return_lse=value),
        "enable_gqa": lambda value: flashcore_attn.scaled_dot_product_attention(x, x, x, enable_gqa=value),
        "dropout_p": lambda value: flashcore_attn.scaled_dot_product_attention(x, x, x, dropout_p=value),
    }
    for name, call in calls.items():
        for value in ("no", None):
            with pytest.raises(flashcore_attn.ArgumentError, match=f"invalid value '{value}' for {name}: expected"):
                call(value)
    with pytest.raises(flashcore_attn.ArgumentError, match="invalid value 'False' for return_lse"):
        flashcore_attn.flash_attn_varlen_func(rows, rows, rows, starts, starts, return_lse="False")
    for value in (0, 1, np.True_):
        calls["return_lse"](value), calls["enable_gqa"](value)


@every_kind
def test_lengths_of_int64_are_those_of_int32(tensors):
    (q, k, v), rows, keys = packed(tensors, [(3, 4), (5, 6)], 2, 2, 16, "float32")
    made = [
        tensors.bits(flashcore_attn.flash_attn_varlen_func(q, k, v, *(tensors.of(x, dtype) for x in (rows, keys))))
        for dtype in ("int32", "int64")
    ]
    assert made[0] == made[1]


@every_kind
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_a_mask_of_a_tokenizer(tensors, dtype):
    q, k, v = (tensors.draw((2, 3, 7, 16), "float32", seed) for seed in range(3))
    kept = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])
    call = flashcore_attn.scaled_dot_product_attention
    made = [tensors.bits(call(q, k, v, attn_mask=tensors.of(kept[:, None, None], kind))) for kind in ("bool", dtype)]
    assert made[0] == made[1]
    with pytest.raises(ValueError, match=r"; a padding mask .* is passed as attn_mask\[:, None, None, :\]"):
        call(q, k, v, attn_mask=tensors.of(kept, dtype))
    with pytest.raises(ValueError, match="invalid value '2' for an element of attn_mask: expected 0 or 1"):
        call(q, k, v, attn_mask=tensors.of(kept[:, None, None] * 2, dtype))


@every_kind
def test_padded_batches_are_packed_and_padded_again(tensors):
    kept = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    unused = np.array([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    q = tensors.draw((3, 5, 2, 16), "float32", 0)
    mask = tensors.of(kept, "int64")
    rows, indices, starts, longest, used = flashcore_attn.unpad_input(q, mask)
    assert tensors.array(starts).tolist() == [0, 3, 6, 6] and tensors.array(used).tolist() == [3, 3, 0]
    assert longest == 3 and tensors.array(indices).tolist() == [2, 3, 4, 5, 6, 7]
    out = flashcore_attn.flash_attn_varlen_func(rows, rows, rows, starts, starts, longest, longest)
    padded = tensors.array(flashcore_attn.pad_input(out, indices, 3, 5))
    heads = np.moveaxis(tensors.array(q), 1, 2)
    for entry, seen in enumerate(kept.astype(bool)):
        one = heads[entry : entry + 1, :, seen]
        if seen.any():
            expected, _ = reference(one, one, one)
            np.testing.assert_allclose(np.moveaxis(padded[entry][seen], 0, 1), expected[0], atol=3e-6)
        assert not padded[entry][~seen].any()
    rows, _, starts, longest, used = flashcore_attn.unpad_input(q, mask != 0, tensors.of(unused, "int64"))
    assert tensors.array(starts).tolist() == [0, 4, 7, 8] and longest == 4 and rows.shape[0] == 8
    assert tensors.array(used).tolist() == [3, 3, 0]
    empty = flashcore_attn.unpad_input(q[:0], mask[:0])
    assert empty[3] == 0 and tensors.array(empty[2]).tolist() == [0] and empty[0].shape[0] == 0
    for call, words in (
        (lambda: flashcore_attn.unpad_input(q, mask * 2), "invalid value '2' for an element of attention_mask"),
        (lambda: flashcore_attn.unpad_input(q, mask[:2]), "the shape of attention_mask"),
        (lambda: flashcore_attn.unpad_input(q, [1]), "attention_mask is a list, hidden_states"),
        (lambda: flashcore_attn.pad_input(rows, indices, 3, 5), "the shape of indices"),
        (lambda: flashcore_attn.pad_input(q[0, :2], indices[:2] - 3, 3, 5), "'-1' for an element of indices"),
        (lambda: flashcore_attn.pad_input(q[0, :2], indices[:2] + 15, 3, 5), "to batch . seqlen - 1 = 14"),
    ):
        with pytest.raises(flashcore_attn.ArgumentError, match=words):
            call()
