"""Arguments that reach a call by another way than its usual one: direct calls of the operators, devices that differ in
a trace, numbers that are tensors, arrays of other libraries, and masks and shapes that PyTorch takes otherwise."""

from __future__ import annotations

import numpy as np
import pytest

import flashcore_attn

torch = pytest.importorskip("torch")
from flashcore_attn import _torch  # noqa: E402, F401  (registers the operators)

F = torch.nn.functional
TORCH_SDPA = F.scaled_dot_product_attention

TERMS = (False, -1, -1, None, 0.0, False)
Q = torch.ones(2, 4, 8, 16)


def with_features(
    q=Q, heads=1, lengths=(None,) * 5, numbers=(0, 0, 0), sink=None, score="", ints=(), tables=(), blocks=(0, 0, 0)
):
    return torch.ops.flashcore_attn.attention_with(
        q, q, q, heads, *TERMS, *lengths, *numbers, sink, score, "", [], list(ints), list(tables), None, None, None,
        list(blocks),
    )  # fmt: skip


USED = torch.ones(2, dtype=torch.int32)
DIRECT = {
    "heads": lambda: torch.ops.flashcore_attn.attention(Q, Q, Q, 7, *TERMS),
    "'0' for heads": lambda: with_features(heads=0),
    "q has 3 dimensions": lambda: torch.ops.flashcore_attn.attention(Q[0], Q[0], Q[0], 1, *TERMS),
    "k has 5 dimensions": lambda: torch.ops.flashcore_attn.attention(Q, Q[None], Q, 2, *TERMS),
    "q has 2 dimensions": lambda: with_features(q=Q[0, 0]),
    "blocks": lambda: with_features(blocks=(0, 0)),
    "'.0, 5, 0.' for blocks": lambda: with_features(blocks=(0, 5, 0)),
    "batch": lambda: with_features(lengths=(None, None, None, USED, None), numbers=(-1, 8, 8)),
    "max_q": lambda: with_features(lengths=(None, None, None, USED, None), numbers=(2, -1, 8)),
    "max_k": lambda: with_features(lengths=(None, None, None, USED, None), numbers=(2, 8, 2**40)),
    "ints": lambda: with_features(score="s + float(i0)", ints=[2**40]),
}


@pytest.mark.parametrize("words", DIRECT)
def test_direct_calls_of_operators(words):
    with pytest.raises(flashcore_attn.ArgumentError, match=words):
        DIRECT[words]()
    assert with_features().__class__ is tuple


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_tables_of_other_types_in_a_direct_call(dtype):
    with pytest.raises(flashcore_attn.DTypeError, match="dtype of table 0: expected torch.float32"):
        with_features(score="s + t0[0]", tables=[torch.zeros(1, dtype=dtype)])


META = {
    "attn_mask": lambda q, to: flashcore_attn.scaled_dot_product_attention(
        q, q, q, torch.ones(8, 8, dtype=torch.bool, device=to)
    ),
    "alibi_slopes": lambda q, to: flashcore_attn.flash_attn_func(q, q, q, alibi_slopes=torch.ones(8, device=to)),
    "learnable_sink": lambda q, to: flashcore_attn.flash_attn_func(q, q, q, learnable_sink=torch.ones(8, device=to)),
    "seqused_k": lambda q, to: flashcore_attn.flash_attn_varlen_func(
        q, q, q, seqused_k=torch.ones(2, dtype=torch.int32, device=to)
    ),
    "descale_q": lambda q, to: flashcore_attn.flash_attn_func(
        *(q.to(torch.float8_e4m3fn),) * 3, descale_q=torch.ones(2, 8, device=to)
    ),
}


@pytest.mark.parametrize("name", META)
def test_operands_on_another_device_are_refused_in_a_trace_too(name):
    from torch._subclasses import FakeTensorMode

    with pytest.raises(flashcore_attn.ArgumentError, match=f"{name} is on meta, q on cpu"):
        META[name](Q, "meta")
    with FakeTensorMode(), pytest.raises(flashcore_attn.ArgumentError, match="is on meta, q on cpu"):
        META[name](torch.ones(2, 4, 8, 16), "meta")
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: META[name](q, "meta"), backend="aot_eager")
    with pytest.raises(Exception, match="is on meta, q on cpu"):
        compiled(Q)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_the_gradient_of_a_number_is_not_lost(name):
    number = torch.tensor(0.5, requires_grad=True)
    for call in (flashcore_attn.flash_attn_func, flashcore_attn.flash_attn_varlen_func):
        with pytest.raises(flashcore_attn.UnsupportedError, match=f"^{name} requires grad"):
            call(Q, Q, Q, **{name: number})
        with torch.no_grad():
            assert torch.equal(call(Q, Q, Q, **{name: number}), call(Q, Q, Q, **{name: 0.5}))
    for call in (flashcore_attn.scaled_dot_product_attention, flashcore_attn.flex_attention):
        with pytest.raises(flashcore_attn.UnsupportedError, match="^scale requires grad"):
            call(Q, Q, Q, scale=number)


def test_vmap_over_no_element():
    q = Q[None][:0]
    mask = torch.ones(8, 8, dtype=torch.bool)
    assert torch.vmap(flashcore_attn.scaled_dot_product_attention)(q, q, q).shape == q.shape
    assert torch.vmap(lambda q: flashcore_attn.scaled_dot_product_attention(q, q, q, mask))(q).shape == q.shape
    out, lse = torch.vmap(lambda q: flashcore_attn.flash_attn_func(q, q, q, return_lse=True))(q)
    assert out.shape == q.shape and lse.shape == (0, 2, 8, 4)


class Foreign:
    """An array of another library."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


PACKED = {
    "qkv": lambda make, qkv, starts, slopes: flashcore_attn.flash_attn_qkvpacked_func(
        make(qkv[None]), alibi_slopes=slopes
    ),
    "kv": lambda make, qkv, starts, slopes: flashcore_attn.flash_attn_kvpacked_func(
        make(qkv[None, :, 0]), make(qkv[None, :, 1:]), alibi_slopes=slopes
    ),
    "varlen qkv": lambda make, qkv, starts, slopes: flashcore_attn.flash_attn_varlen_qkvpacked_func(
        make(qkv), make(starts), 8, alibi_slopes=slopes
    ),
    "varlen kv": lambda make, qkv, starts, slopes: flashcore_attn.flash_attn_varlen_kvpacked_func(
        make(qkv[:, 0]), make(qkv[:, 1:]), make(starts), make(starts), 8, 8, alibi_slopes=slopes
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_slopes_of_another_library_beside_packed_tensors(name):
    qkv = np.random.default_rng(0).standard_normal((12, 3, 2, 16)).astype(np.float32)
    starts, slopes = np.array([0, 5, 12], np.int32), np.array([0.5, 0.25], np.float32)
    expected = PACKED[name](lambda x: x, qkv, starts, slopes)
    assert np.array_equal(PACKED[name](Foreign, qkv, starts, Foreign(slopes)), expected)
    assert not np.array_equal(PACKED[name](Foreign, qkv, starts, None), expected)


def test_compat_leaves_masks_of_fewer_than_two_dimensions_to_pytorch():
    flashcore_attn.compat.reset_stats()
    for mask in (torch.ones(8, dtype=torch.bool), torch.tensor(0.0)):
        with pytest.raises(IndexError):
            TORCH_SDPA(Q, Q, Q, mask)
        with flashcore_attn.compat.enabled(), pytest.raises(IndexError):
            F.scaled_dot_product_attention(Q, Q, Q, mask)
    assert flashcore_attn.compat.stats()["reasons"] == {"attn_mask": 2}


def test_compat_keeps_the_shape_of_a_result_without_elements():
    flashcore_attn.compat.reset_stats()
    k = torch.ones(2, 3, 5, 16)
    for tensors in [(k[:, :1, :0], k, k), (k[:1], k[:, :, :0], k[:, :, :0, :8]), (k[:1], k[:0], k[:0])]:
        expected = TORCH_SDPA(*tensors)
        with flashcore_attn.compat.enabled():
            assert F.scaled_dot_product_attention(*tensors).shape == expected.shape
    assert flashcore_attn.compat.stats()["reasons"] == {"no elements": 3}
    with flashcore_attn.compat.enabled():
        assert F.scaled_dot_product_attention(k[:0], k[:0], k[:0]).shape == (0, 3, 5, 16)
    assert flashcore_attn.compat.stats()["flashcore"] == 1


def test_nested_tensors_are_refused_wherever_they_are():
    nested = torch.nested.nested_tensor([torch.ones(3, 2, 16), torch.ones(5, 2, 16)])
    q = torch.ones(2, 2, 8, 16)
    calls = [
        lambda x: flashcore_attn.flash_attn_func(x, x, x),
        lambda x: flashcore_attn.flash_attn_qkvpacked_func(x),
        lambda x: flashcore_attn.flash_attn_kvpacked_func(q, x),
        lambda x: flashcore_attn.flash_attn_varlen_func(x, q, q),
        lambda x: flashcore_attn.scaled_dot_product_attention(q, q, x),
        lambda x: flashcore_attn.quantize(q, x, q),
        lambda x: flashcore_attn.flex_attention(q, q, q, lambda s, b, h, i, j: s + x[i]),
    ]
    for call in calls:
        with pytest.raises(flashcore_attn.UnsupportedError, match="nested"):
            call(nested)
    lists = flashcore_attn.BlockSparseTensors(nested, nested)
    with pytest.raises(flashcore_attn.ArgumentError, match="the type of mask_block_cnt"):
        flashcore_attn.block_sparse_mask(None, lists, (8, 8))


@pytest.mark.parametrize("module", [flashcore_attn, flashcore_attn.compat])
def test_dir_shows_the_interface_alone(module):
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
