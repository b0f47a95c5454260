"""FlashAttention's windows, caps and packed tensors, for every kind of tensor, against attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import TOLERANCE, Tensors, every_kind

import flashcore_attn

DTYPES = ["float32", "float16", "bfloat16"]

# (left, right): on both sides, on one, of the query's own key alone, and wider than the keys on a side.
WINDOWS = [(3, 4), (0, 0), (9, 0), (-1, 2), (7, -1), (0, -1), (2, 5000), (2**32 - 1, 1), (-1, -1)]
# Queries, keys, query heads, key heads, head dim: no length is a multiple of a tile, the lengths differ both
# ways.
SHAPES = [(41, 41, 2, 2, 16), (33, 71, 4, 2, 40), (70, 33, 4, 1, 64), (1, 100, 6, 2, 64), (131, 260, 2, 1, 32)]


def attention(q, k, v, left=-1, right=-1, scale=None, softcap=0.0):
    """The definition, row by row in float64, of ``(batch, sequence, heads, dim)``: O and the log-sum-exp."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (batch, rows, heads, dim), keys, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    out, lse = np.zeros((batch, rows, heads, v.shape[3])), np.full((batch, heads, rows), -np.inf)
    position = np.arange(keys)
    for b, h, i in np.ndindex(batch, heads, rows):
        own = i + keys - rows
        seen = np.ones(keys, bool)
        if left >= 0:
            seen &= position >= own - left
        if right >= 0:
            seen &= position <= own + right
        if not seen.any():
            continue
        s = k[b, seen, h // group] @ q[b, i, h] * (dim**-0.5 if scale is None else scale)
        if softcap:
            s = softcap * np.tanh(s / softcap)
        weights = np.exp(s - s.max())
        out[b, i, h] = weights @ v[b, seen, h // group] / weights.sum()
        lse[b, h, i] = np.log(weights.sum()) + s.max()
    return out, lse


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_windows_and_caps(tensors, dtype, softcap, shape):
    q, k, v = tensors.three(*shape, dtype)
    scale = 0.3  # scores of standard deviation above 1, so that a cap of 2.5 changes them
    for left, right in WINDOWS:
        for causal in (False, True):
            asked = {"window_size": (left, right), "causal": causal, "softcap": softcap, "softmax_scale": scale}
            exact, exact_lse = attention(*map(tensors.array, (q, k, v)), left, 0 if causal else right, scale, softcap)
            out, lse, _ = flashcore_attn.flash_attn_func(q, k, v, return_attn_probs=True, **asked)
            alone = flashcore_attn.flash_attn_func(q, k, v, **asked)
            assert out.shape == q.shape and out.dtype == q.dtype
            for result in (out, alone):  # without an LSE, a CPU may multiply 16-bit numbers as integers
                worst = np.abs(tensors.array(result) - exact).max()
                assert worst <= TOLERANCE[dtype], (asked, worst)
            atol = 2e-3 if tensors.kind == "cuda" else 3e-5
            np.testing.assert_allclose(tensors.array(lse), exact_lse, atol=atol, rtol=1e-5, err_msg=str(asked))


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_no_key(tensors, dtype):
    q, k, v = tensors.three(37, 5, 4, 2, 16, dtype)
    for softcap in (0.0, 3.0):
        for window in [(0, 0), (40, 0), (3, 20)]:
            out, lse, _ = flashcore_attn.flash_attn_func(
                q, k, v, window_size=window, softcap=softcap, return_attn_probs=True
            )
            blind = max(37 - 5 - window[1], 0)  # the own key of query i is i - 32
            out, lse = tensors.array(out), tensors.array(lse)
            assert not out[:, :blind].any() and np.isneginf(lse[..., :blind]).all()
            assert out[:, blind:].any() and np.isfinite(lse[..., blind:]).all()
    # No key at all.
    out, lse, _ = flashcore_attn.flash_attn_func(
        q, k[:, :0], v[:, :0], window_size=(3, 3), softcap=1.0, return_attn_probs=True
    )
    assert not tensors.array(out).any() and np.isneginf(tensors.array(lse)).all()


@every_kind
def test_causal_is_a_window(tensors):
    for rows, keys in [(40, 40), (33, 71), (71, 33), (1, 50)]:
        q, k, v = tensors.three(rows, keys, 4, 2, 32, "float16")

        def bits(q=q, k=k, v=v, **asked):
            parts = flashcore_attn.flash_attn_func(q, k, v, return_attn_probs=True, **asked)[:2]
            return [tensors.bits(part) for part in (*parts, flashcore_attn.flash_attn_func(q, k, v, **asked))]

        causal = bits(causal=True)
        assert bits(window_size=(-1, 0)) == causal
        assert bits(causal=True, window_size=(-1, 9)) == causal, "causal makes the right side 0"
        assert bits(causal=True, window_size=(6, 9)) == bits(window_size=[np.int64(6), 0])
        assert bits(window_size=(keys + rows, -1)) == bits()


@every_kind
def test_hidden_keys_do_not_matter(tensors):
    q, k, v = tensors.three(64, 64, 2, 2, 32, "float16")
    window = {"window_size": (7, 3), "softcap": 4.0}
    expected = tensors.bits(flashcore_attn.flash_attn_func(q, k, v, **window)[:, :40])
    k[:, 50:] = v[:, 50:] = 1000.0
    assert tensors.bits(flashcore_attn.flash_attn_func(q, k, v, **window)[:, :40]) == expected


ONE = np.ones((1, 8, 2, 16), np.float32)
NO_WINDOWS = [
    3,
    None,
    "ab",
    (1,),
    (1, 2, 3),
    (1.0, 2),
    (1, "2"),
    (-2, 0),
    (0, -7),
    (2**32, 0),
    (0, 10**30),
]
NO_CAPS = [-1.0, -1, float("nan"), float("inf"), -float("inf"), "30", None, (1.0,), 1j]
REFUSED = [
    *[({"window_size": size}, f"invalid value '{size}' for window_size: expected two integers") for size in NO_WINDOWS],
    (
        {"window_size": (np.ones(2, int), 1)},
        "invalid value '(array([1, 1]), 1)' for window_size: expected two integers",
    ),
    ({"window_size": np.ones((2, 2), int)}, "invalid value '[[1 1] [1 1]]' for window_size: expected two integers"),
    *[({"softcap": cap}, f"invalid value '{cap}' for softcap: expected 0 (no cap) or a positive") for cap in NO_CAPS],
    ({"softcap": 10**400}, "invalid value 'an integer of 1329 bits' for softcap: expected 0 (no cap) or a positive"),
    # Finite, but not in float32, or not with this scale.
    ({"softcap": 1e39}, "for softcap: expected a positive number"),
    ({"softcap": 1e-50}, "for softcap: expected a positive number"),
    ({"softcap": 1e-30, "softmax_scale": 1e30}, "for softcap: expected a positive number"),
]


@every_kind
def test_refusals_name_the_argument(tensors):
    x = tensors.of(ONE, "float16")
    for asked, words in REFUSED:
        with pytest.raises(flashcore_attn.ArgumentError) as caught:
            flashcore_attn.flash_attn_func(x, x, x, **asked)
        assert words in str(caught.value)


@every_kind
def test_numbers_of_other_kinds(tensors):
    q, k, v = tensors.three(20, 20, 2, 2, 16, "float16")
    expected = tensors.bits(flashcore_attn.flash_attn_func(q, k, v, window_size=(3, 2), softcap=5.0))
    for window, cap in [([3, 2], 5), (np.array([3, 2]), np.float32(5)), ((np.int8(3), np.uint64(2)), np.float64(5))]:
        assert tensors.bits(flashcore_attn.flash_attn_func(q, k, v, window_size=window, softcap=cap)) == expected
    whole = tensors.bits(flashcore_attn.flash_attn_func(q, k, v))
    assert tensors.bits(flashcore_attn.flash_attn_func(q, k, v, softcap=-0.0)) == whole, "no cap"


class OnlyDlpack:
    """An array that supports only DLPack."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def test_dlpack():
    tensors = Tensors("numpy")
    q, k, v = tensors.three(20, 33, 4, 2, 16, "float32")
    asked = {"window_size": (3, 2), "softcap": 2.0, "return_attn_probs": True}
    out, lse, _ = flashcore_attn.flash_attn_func(*map(OnlyDlpack, (q, k, v)), **asked)
    expected, expected_lse, _ = flashcore_attn.flash_attn_func(q, k, v, **asked)
    assert (out == expected).all() and (lse == expected_lse).all()
    kv = np.stack([k, v], 2)
    assert (flashcore_attn.flash_attn_kvpacked_func(OnlyDlpack(q), OnlyDlpack(kv), **asked)[0] == expected).all()
    qkv = np.stack([q, q, q], 2)
    packed = flashcore_attn.flash_attn_qkvpacked_func(OnlyDlpack(qkv), causal=True)
    assert (packed == flashcore_attn.flash_attn_func(q, q, q, causal=True)).all()
    with pytest.raises(ValueError, match="^invalid value 'str' for the type of qkv: expected a PyTorch tensor"):
        flashcore_attn.flash_attn_qkvpacked_func("qkv")


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_tensors(tensors, dtype, monkeypatch):
    qkv = tensors.draw((2, 50, 3, 4, 32), dtype, 7)
    q, kv = tensors.draw((2, 21, 8, 32), dtype, 8), tensors.draw((2, 50, 2, 4, 32), dtype, 9)
    options = (0.0, 0.25, True, (9, 0), 3.0, None, False, True)  # FlashAttention's order
    for ours, parts in [
        (flashcore_attn.flash_attn_qkvpacked_func(qkv, *options), [qkv[:, :, i] for i in range(3)]),
        (flashcore_attn.flash_attn_kvpacked_func(q, kv, *options), [q, kv[:, :, 0], kv[:, :, 1]]),
    ]:
        exact, exact_lse = attention(*map(tensors.array, parts), 9, 0, 0.25, 3.0)
        assert np.abs(tensors.array(ours[0]) - exact).max() <= TOLERANCE[dtype]
        np.testing.assert_allclose(tensors.array(ours[1]), exact_lse, atol=2e-3)
        assert ours[2] is None
        same = flashcore_attn.flash_attn_func(*parts, *options)
        assert [tensors.bits(x) for x in ours[:2]] == [tensors.bits(x) for x in same[:2]]


def test_packed_tensors_are_read_in_place(monkeypatch):
    from flashcore_attn import _flashcore, _numpy

    handed = []
    compute = _flashcore.attend
    recorded = lambda *arguments: handed.append(arguments[:3]) or compute(*arguments)  # noqa: E731
    monkeypatch.setattr(_numpy._flashcore, "attend", recorded)
    qkv = np.ones((2, 5, 3, 4, 32), np.float16)
    flashcore_attn.flash_attn_qkvpacked_func(qkv)
    assert [part[0] - qkv.ctypes.data for part in handed[0]] == [0, 4 * 32 * 2, 8 * 32 * 2]


@every_kind
def test_packed_refusals(tensors):
    x, q = tensors.of(np.ones((1, 8, 2, 2, 16), np.float32), "float16"), tensors.of(ONE, "float16")
    other = np.ones((1, 8, 2, 2, 16), np.float16) if tensors.kind != "numpy" else [[1.0]]
    for call, words in [
        (lambda: flashcore_attn.flash_attn_qkvpacked_func(x), "invalid value '(1, 8, 2, 2, 16)' for the shape of qkv"),
        (lambda: flashcore_attn.flash_attn_kvpacked_func(q, x[0]), "invalid value '(8, 2, 2, 16)' for the shape of kv"),
        (lambda: flashcore_attn.flash_attn_kvpacked_func(q, other), f"kv is a {type(other).__name__}, q a "),
    ]:
        with pytest.raises(flashcore_attn.ArgumentError) as caught:
            call()
        assert words in str(caught.value)


def test_the_operator_refuses_bounds_that_are_no_number_of_keys():
    torch = pytest.importorskip("torch")
    q = torch.ones(1, 8, 2, 16)
    for bounds, words in [((-2, 0), "'-2' for before"), ((0, 2**32), "'4294967296' for after")]:
        with pytest.raises(flashcore_attn.ArgumentError, match=f"^invalid value {words}: expected -1 "):
            torch.ops.flashcore_attn.attention(q, q, q, 2, False, *bounds, None, 0.0, False)


def test_a_changed_window_compiles_nothing_anew():
    torch = pytest.importorskip("torch")
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def layer(q, k, v, window):
        return flashcore_attn.flash_attn_func(q, k, v, window_size=window, softcap=2.0, return_attn_probs=True)

    q, k, v = Tensors("torch").three(20, 33, 4, 2, 16, "float32")
    for window in [(3, 4), (5, 2), (30, 6), (8, 7), (2, 9)]:
        out, lse, _ = layer(q, k, v, window)
        expected, expected_lse, _ = flashcore_attn.flash_attn_func(
            q, k, v, window_size=window, softcap=2.0, return_attn_probs=True
        )
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert counter.frame_count == 2, "the first graph has the window as a constant, the second takes any"
