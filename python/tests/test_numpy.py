"""NumPy arrays against attention in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import TOLERANCE, OnlyDlpack, bf16, reference

import flashcore_attn

DTYPES = ["float32", "float16", "bfloat16"]


def draw(shape, dtype, seed):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values.astype(bf16() if dtype == "bfloat16" else dtype)


def bhsd(x):
    return np.asarray(x).swapaxes(1, 2)


def close(ours, exact, dtype):
    worst = np.max(np.abs(np.asarray(ours, np.float64) - exact), initial=0.0)
    assert worst <= TOLERANCE[dtype], worst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys", "heads", "heads_k", "dim"), [
    (64, 64, 4, 4, 64), (1, 77, 8, 2, 128), (33, 20, 2, 1, 40), (20, 33, 3, 3, 8), (5, 1, 1, 1, 1),
])  # fmt: skip
def test_flash_attn_func(dtype, causal, rows, keys, heads, heads_k, dim):
    q = draw((2, rows, heads, dim), dtype, 1)
    k, v = draw((2, keys, heads_k, dim), dtype, 2), draw((2, keys, heads_k, dim), dtype, 3)
    out, lse, probabilities = flashcore_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    exact, exact_lse = reference(bhsd(q), bhsd(k), bhsd(v), causal)
    assert out.shape == q.shape and out.dtype == q.dtype and probabilities is None
    assert lse.shape == (2, heads, rows) and lse.dtype == np.float32
    close(bhsd(out), exact, dtype)
    np.testing.assert_allclose(lse, exact_lse, atol=2e-5)
    # Without an LSE, 16-bit inputs may be multiplied as integers. Repeated calls give equal bits.
    alone, again = (flashcore_attn.flash_attn_func(q, k, v, causal=causal) for _ in range(2))
    close(bhsd(alone), exact, dtype)
    assert again.tobytes() == alone.tobytes()


@pytest.mark.parametrize(("rows", "keys"), [(9, 9), (9, 30), (30, 9), (7, 0)])
def test_causal_is_aligned_as_pytorch_does(rows, keys):
    q, k, v = (
        draw((2, 3, rows, 16), "float32", 1),
        draw((2, 3, keys, 16), "float32", 2),
        draw((2, 3, keys, 8), "float32", 3),
    )
    exact, _ = reference(q, k, v, causal=True, top_left=True)
    close(flashcore_attn.scaled_dot_product_attention(q, k, v, is_causal=True), exact, "float32")


def test_leading_dimensions_broadcast():
    q, k, v = draw((5, 1, 3, 6, 16), "float32", 1), draw((2, 3, 7, 16), "float32", 2), draw((7, 4), "float32", 3)
    out = flashcore_attn.scaled_dot_product_attention(q, k, v)
    wide = [np.broadcast_to(x, (5, 2, 3, *x.shape[-2:])).reshape(10, 3, *x.shape[-2:]) for x in (q, k, v)]
    assert out.shape == (5, 2, 3, 6, 4)
    close(out.reshape(10, 3, 6, 4), reference(*wide)[0], "float32")
    out = flashcore_attn.scaled_dot_product_attention(q[0, 0], k, v, is_causal=True)
    assert out.shape == (2, 3, 6, 4)
    out = flashcore_attn.scaled_dot_product_attention(q[0, 0, 0], k[0, 0], v)
    assert out.shape == (6, 4)


def test_grouped_queries():
    q, k = draw((2, 6, 9, 16), "float32", 1), draw((2, 2, 9, 16), "float32", 2)
    out = flashcore_attn.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    close(out, reference(q, k, k)[0], "float32")
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flashcore_attn.scaled_dot_product_attention(q, k, k)
    with pytest.raises(ValueError, match="6, 4 and 4 heads"):
        flashcore_attn.scaled_dot_product_attention(
            q, draw((2, 4, 9, 16), "float32", 2), draw((2, 4, 9, 16), "float32", 2), enable_gqa=True
        )


def test_strides_of_every_kind():
    base = draw((2, 40, 3, 4, 32), "float16", 1)  # q, k and v packed
    q, k, v = base[:, :, 0], base[:, ::-1, 1], base[:, ::2, 2][:, np.arange(20).repeat(2)]
    views = {
        "packed": (q, base[:, :, 1], base[:, :, 2]),
        "backwards": (q[:, ::-1], k, base[:, ::-1, 2]),
        "broadcast": (np.broadcast_to(q[:1], q.shape), np.broadcast_to(k[:, :, :1], k.shape), v),
        "last dimension strided": (np.asfortranarray(q), np.repeat(k, 2, axis=-1)[..., ::2], v),
    }
    for name, (q, k, v) in views.items():
        out = flashcore_attn.flash_attn_func(q, k, v, causal=True)
        exact, _ = reference(bhsd(q), bhsd(k), bhsd(v), causal=True)
        assert np.abs(bhsd(out) - exact).max() < TOLERANCE["float16"], name


def test_misaligned_and_odd_strides():
    raw = np.zeros(2 * 8 * 2 * 16 * 4 + 1, np.uint8)
    x = raw[1:].view(np.float32).reshape(2, 8, 2, 16)
    x[:] = draw(x.shape, "float32", 1)
    close(bhsd(flashcore_attn.flash_attn_func(x, x, x)), reference(*[bhsd(x)] * 3)[0], "float32")
    fields = np.zeros((2, 8, 2), np.dtype([("tag", "u1"), ("row", "f4", (16,))]))
    fields["row"] = x
    row = fields["row"]
    close(bhsd(flashcore_attn.flash_attn_func(row, row, row)), reference(*[bhsd(x)] * 3)[0], "float32")


def test_nothing_to_do():
    empty = np.zeros((0, 8, 2, 16), np.float16)
    assert flashcore_attn.flash_attn_func(empty, empty, empty).shape == (0, 8, 2, 16)
    q, k = np.ones((1, 4, 2, 16), np.float32), np.ones((1, 0, 2, 16), np.float32)
    out, lse, _ = flashcore_attn.flash_attn_func(q, k, k, return_attn_probs=True)
    assert not out.any() and np.isneginf(lse).all()
    none = q[:, :0]
    assert flashcore_attn.flash_attn_func(none, q, q).shape == (1, 0, 2, 16)
    headless = q[:, :, :0]
    assert flashcore_attn.flash_attn_func(headless, headless, headless).shape == (1, 4, 0, 16)


def test_an_empty_output_is_checked_too():
    x = np.ones((1, 4, 2, 16), np.float32)
    none = x[:, :0]
    for q, k, v, options, words in [
        (none, x, x[:, :3], {}, "v has sequence length = 3, but k has 4"),
        (none, x[..., :8], x, {}, "k has head_dim = 8, but q has 16"),
        (x[:0], x, x, {}, "k has batch = 1, but q has 0"),
        (none, x, x, {"softmax_scale": float("nan")}, "invalid value 'NaN' for softmax_scale: expected"),
        (x, x, x[..., :0], {"return_attn_probs": True}, "invalid value '0' for head_dim_v"),
    ]:
        with pytest.raises(ValueError, match=words):
            flashcore_attn.flash_attn_func(q, k, v, **options)


def test_a_mask_is_not_ignored():
    x = np.ma.masked_less(draw((1, 4, 2, 16), "float32", 1), 0)
    with pytest.raises(NotImplementedError, match="^invalid value 'MaskedArray' for the type of k"):
        flashcore_attn.flash_attn_func(x.data, x, x)
    x, mask, two = x.data, np.ma.ones((4, 4)), np.ma.ones(2, np.float32)
    rows, starts = x[0], np.ma.array([0, 4], np.int32)
    for name, call in {
        "attn_mask": lambda: flashcore_attn.scaled_dot_product_attention(*[x.swapaxes(1, 2)] * 3, mask),
        "alibi_slopes": lambda: flashcore_attn.flash_attn_func(x, x, x, alibi_slopes=two),
        "learnable_sink": lambda: flashcore_attn.flash_attn_func(x, x, x, learnable_sink=two),
        "descale_q": lambda: flashcore_attn.flash_attn_func(x, x, x, descale_q=two[None]),
        "cu_seqlens_q": lambda: flashcore_attn.flash_attn_varlen_func(rows, rows, rows, starts, starts),
    }.items():
        with pytest.raises(NotImplementedError, match=f"^invalid value 'MaskedArray' for the type of {name}"):
            call()


def test_inputs_may_be_read_only():
    q = draw((1, 8, 2, 16), "float32", 1)
    expected = flashcore_attn.flash_attn_func(q, q, q)
    q.flags.writeable = False
    assert (flashcore_attn.flash_attn_func(q, q, q) == expected).all()


ONE = np.ones((1, 8, 2, 16), np.float32)


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"dropout_p": 1.1}, ValueError, "^invalid value '1.1' for dropout_p: expected a number from 0 to 1"),
    ({"alibi_slopes": ONE}, ValueError, r"^invalid value '\(1, 8, 2, 16\)' for the shape of alibi_slopes: expected"),
    ({"alibi_slopes": np.ones(2, int)}, TypeError, "^invalid value 'int64' for the dtype of alibi_slopes"),
    ({"learnable_sink": np.ones(3)}, ValueError, r"^invalid value '\(3,\)' for the shape of learnable_sink"),
    ({"learnable_sink": np.ones(2, np.int32)}, TypeError, "^invalid value 'int32' for the dtype of learnable_sink"),
    ({"attention_chunk": -1}, ValueError, "^invalid value '-1' for attention_chunk: expected an integer of 0 to 2"),
    ({"attention_chunk": 2**31}, ValueError, "^invalid value '2147483648' for attention_chunk: expected an integer"),
    ({"attention_chunk": 1.5}, ValueError, "^invalid value '1.5' for attention_chunk: expected an integer"),
    ({"learnable_sink": [0.0, 0.0]}, ValueError, "^learnable_sink is a list; expected a NumPy array"),
    ({"learnable_sink": 1.0}, ValueError, "^learnable_sink is a float; expected a NumPy array"),
    ({"alibi_slopes": [1.0, 1.0]}, ValueError, "^alibi_slopes is a list; expected a NumPy array"),
    ({"softmax_scale": float("nan")}, ValueError, "^invalid value 'NaN' for softmax_scale: expected a finite number"),
    ({"softmax_scale": "x"}, ValueError, "^invalid value 'x' for softmax_scale: expected a number"),
    ({"causal": "yes"}, ValueError, "^invalid value 'yes' for causal: expected True or False"),
    ({"k": ONE.astype(np.float16)}, TypeError, "dtypes float32, float16 and float32"),
    ({"q": ONE.astype(np.float64), "k": ONE, "v": ONE}, TypeError, "^invalid value 'float64' for the dtype of q"),
    ({"q": ONE.astype(np.uint16)}, TypeError, "ml_dtypes.bfloat16"),
    ({"q": ONE.astype(">f4")}, TypeError, "native byte order"),
    ({"q": ONE[0]}, ValueError, "q has 3 dimensions; it takes 4"),
    ({"k": ONE.repeat(2, 2)[:, :, :3], "v": ONE.repeat(2, 2)[:, :, :3]}, ValueError, "multiple of heads_kv = 3"),
    ({"k": np.ones((1, 8, 2, 8), np.float32)}, ValueError, "k has head_dim = 8, but q has 16"),
    ({"v": np.ones((1, 9, 2, 16), np.float32)}, ValueError, "v has sequence length = 9, but k has 8"),
    ({"k": np.ones((2, 8, 2, 16), np.float32)}, ValueError, "k has batch = 2, but q has 1"),
    ({"k": [[1.0]]}, ValueError, "k is a list"),
    ({"q": "text"}, ValueError, "^invalid value 'str' for the type of q: expected a PyTorch tensor"),
])  # fmt: skip
def test_refusals_name_the_argument(arguments, error, words):
    arguments = {"q": ONE, "k": ONE, "v": ONE, **arguments}
    with pytest.raises(error, match=words) as caught:
        flashcore_attn.flash_attn_func(**arguments)
    assert isinstance(caught.value, flashcore_attn.FlashCoreError)


def test_sdpa_refusals():
    # ONE has 8 heads of 2 positions.
    for mask, error, words in [
        (np.ones((8, 8), bool), ValueError, r"^invalid value '\(8, 8\)' for the shape of attn_mask: expected one that"),
        (np.ones((2, 2, 2, 2, 2), bool), ValueError, "for the shape of attn_mask"),
        (np.ones((2, 2), np.int16), TypeError, "for the dtype of attn_mask: expected bool, float32 or float64$"),
        ("x", ValueError, "attn_mask is a str, query a ndarray; they must be of one kind"),
    ]:
        with pytest.raises(error, match=words):
            flashcore_attn.scaled_dot_product_attention(ONE, ONE, ONE, attn_mask=mask)
    with pytest.raises(
        ValueError, match="^invalid value 'True' for is_causal: expected False where attn_mask is given"
    ):
        flashcore_attn.scaled_dot_product_attention(ONE, ONE, ONE, attn_mask=np.ones((2, 2), bool), is_causal=True)
    with pytest.raises(ValueError, match="^invalid value 'x' for scale: expected a number"):
        flashcore_attn.scaled_dot_product_attention(ONE, ONE, ONE, scale="x")
    with pytest.raises(ValueError, match="^invalid value 'yes' for is_causal: expected True or False"):
        flashcore_attn.scaled_dot_product_attention(ONE, ONE, ONE, is_causal="yes")
    with pytest.raises(ValueError, match="leading dimensions do not broadcast"):
        flashcore_attn.scaled_dot_product_attention(np.ones((3, 8, 16), np.float32), ONE, ONE)
    with pytest.raises(ValueError, match="query has 1 dimension;"):
        flashcore_attn.scaled_dot_product_attention(np.ones(16, np.float32), ONE, ONE)


def test_flags_of_other_kinds_of_bool():
    causal = flashcore_attn.flash_attn_func(ONE, ONE, ONE, causal=True)
    for flag in (1, np.True_):
        assert (flashcore_attn.flash_attn_func(ONE, ONE, ONE, causal=flag) == causal).all()


def test_explain_says_what_it_was_given():
    with pytest.raises(NotImplementedError, match="CUDA tensors of PyTorch only; q is a ndarray"):
        flashcore_attn.explain(ONE, ONE, ONE)


def test_compat_without_torch_says_so():
    code = """
import sys
sys.modules["torch"] = None
import flashcore_attn
flashcore_attn.compat.disable()
try:
    with flashcore_attn.compat.enabled():
        pass
except flashcore_attn.UnsupportedError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "PyTorch is not installed" in said


def test_problems_are_looked_at_before_a_cluster_is_started():
    code = """
import sys
sys.modules["ray"] = None
import flashcore_attn.ray
try:
    flashcore_attn.ray.evolve("foo", candidates=1)
except flashcore_attn.ArgumentError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("invalid value 'foo' for problem: expected BATCH,HEADS")


class OnTheMoon(OnlyDlpack):
    def __dlpack_device__(self):
        return (12, 0)


def test_dlpack():
    q = draw((1, 8, 2, 16), "float32", 1)
    expected = flashcore_attn.flash_attn_func(q, q, q)
    out = flashcore_attn.flash_attn_func(*[OnlyDlpack(q)] * 3)
    assert isinstance(out, np.ndarray) and (out == expected).all()
    with pytest.raises(NotImplementedError, match="^invalid value '12' for the DLPack device type of q"):
        flashcore_attn.flash_attn_func(*[OnTheMoon(q)] * 3)


class OnlyInterface:
    """An array that offers only NumPy's older `__array_interface__`."""

    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


def test_the_array_interface_is_enough():
    q = draw((1, 8, 2, 16), "float32", 1)
    out = flashcore_attn.flash_attn_func(*[OnlyInterface(q)] * 3)
    assert np.array_equal(out, flashcore_attn.flash_attn_func(q, q, q))


class LiesOnShape(np.ndarray):
    shape = property(lambda self: (1, 1 << 22, 2, 16))
    strides = property(lambda self: ((1 << 22) * 128, 128, 64, 4))


def test_a_subclass_is_as_large_as_its_memory():
    q, k = draw((1, 4, 2, 16), "float32", 1), draw((1, 64, 2, 16), "float32", 2)
    lying = k.view(LiesOnShape)
    assert np.array_equal(flashcore_attn.flash_attn_func(q, lying, lying), flashcore_attn.flash_attn_func(q, k, k))


def test_a_scale_beyond_every_float_is_refused():
    q = draw((1, 4, 2, 8), "float32", 1)
    for scale in (10**400, -(10**5000)):
        with pytest.raises(
            flashcore_attn.ArgumentError, match="^invalid value 'an integer of [0-9]+ bits' for softmax_scale"
        ):
            flashcore_attn.flash_attn_func(q, q, q, softmax_scale=scale)


FORK = """
import os, sys, numpy as np, flashcore_attn
q = np.random.default_rng(1).standard_normal((1, 512, 8, 32), dtype="float32")
expected = flashcore_attn.flash_attn_func(q, q, q) if sys.argv[1] == "after" else None
child = os.fork()
if child == 0:
    out = flashcore_attn.flash_attn_func(q, q, q)
    threads = len(os.listdir("/proc/self/task"))
    same = expected is None or np.array_equal(out, expected)
    os._exit(0 if same and threads > 1 else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forked_child_computes_on_threads_of_its_own(when):
    """The child inherits the parent's pool but none of its threads. It must not wait for them, and starts its own."""
    environment = {**os.environ, "RAYON_NUM_THREADS": "3"}
    fork = [sys.executable, "-c", FORK, when]
    done = subprocess.run(fork, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0"


def test_neither_numpy_nor_torch_is_imported_for_us():
    code = "import flashcore_attn, sys; print([m for m in ('numpy', 'torch') if m in sys.modules])"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert listed.strip() == "[]"


def test_doctor(capsys):
    lines = flashcore_attn.doctor()
    assert "threads" in lines["cpu"] and lines["cpu"] in capsys.readouterr().out


def misaligned(x):
    """The same numbers at an odd address."""
    return np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)


def test_operands_at_odd_addresses():
    q = np.random.default_rng(0).standard_normal((2, 8, 2, 16)).astype(np.float32)
    used, starts = np.array([3, 5], np.int32), np.array([0, 6, 8], np.int32)
    mask = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
    eight, factors = q.astype(pytest.importorskip("ml_dtypes").float8_e4m3fn), mask[:2, :2] ** 2
    ours, varlen = flashcore_attn.flash_attn_func, flashcore_attn.flash_attn_varlen_func
    for call, x in (
        (lambda x: ours(q, q, q, learnable_sink=x), mask[0, :2]),
        (lambda x: ours(q, q, q, alibi_slopes=x), mask[0, :2]),
        (lambda x: ours(eight, eight, eight, descale_q=x), factors),
        (lambda x: varlen(q, q, q, seqused_k=x), used),
        (lambda x: varlen(q[0], q[0], q[0], x, x), starts),
        (lambda x: flashcore_attn.scaled_dot_product_attention(q, q, q, x), mask[:2, :2]),
        (lambda x: flashcore_attn.quantize(x, q, q).q, q),
    ):
        assert not misaligned(x).flags.aligned
        assert np.array_equal(np.asarray(call(misaligned(x))), np.asarray(call(x)))


def test_whatever_another_library_raises_names_the_argument():
    class Array:
        def __dlpack_device__(self):
            raise KeyError("device")

    q = np.zeros((1, 4, 2, 16), np.float32)
    with pytest.raises(flashcore_attn.UnsupportedError, match="^q cannot be viewed as an array"):
        flashcore_attn.flash_attn_func(Array(), q, q)


def test_arrays_of_a_class_that_reports_another_shape():
    class Sly(np.ndarray):
        @property
        def shape(self):
            return (1,)

    q = np.random.default_rng(0).standard_normal((2, 2, 8, 16)).astype(np.float32)
    call = flashcore_attn.scaled_dot_product_attention
    assert np.array_equal(call(q.view(Sly), q[0], q), call(q, q[0], q))
