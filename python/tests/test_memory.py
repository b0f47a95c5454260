"""Tensors without memory: whatever the operand, the call refuses them by name and never reads them.

On a GPU, an illegal access would end every later test of the process.
"""

from __future__ import annotations

import contextlib

import pytest

import flashcore_attn

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
from flashcore_attn import _torch  # noqa: E402, F401  (registers the operators)

F = torch.nn.functional

KINDS = ["torch", "pretended", pytest.param("cuda", marks=pytest.mark.needs_cuda)]
every_tensor = pytest.mark.parametrize("tensors", KINDS, indirect=True)


def released(x):
    """The tensor behind 64 other elements in a storage without memory."""
    size = x.element_size()
    storage = torch.zeros((64 + x.numel()) * size, dtype=torch.uint8, device=x.device).untyped_storage()
    view = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 64, x.shape)
    storage.resize_(0)
    return view


def cut(x):
    """The tensor in a storage that is one element too short."""
    storage = torch.zeros(x.numel() * x.element_size(), dtype=torch.uint8, device=x.device).untyped_storage()
    view = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape)
    storage.resize_(storage.nbytes() - x.element_size())
    return view


def spread(x):
    """A released tensor whose last dimension is not contiguous: its first reader would be a copy."""
    storage = torch.zeros(2 * x.numel() * x.element_size(), dtype=torch.uint8, device=x.device).untyped_storage()
    strides = [2 * stride for stride in x.contiguous().stride()]
    view = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, strides)
    storage.resize_(0)
    return view


def never(x):
    """Zeros that never had memory, as those of forward-mode derivatives."""
    return torch._efficientzerotensor(tuple(x.shape), dtype=x.dtype, device=x.device)


BREAKS = [released, cut, spread, never]


def operands(device):
    """For each operand: what messages call it, a tensor that is accepted, and a call with it."""
    make = lambda *shape, dtype=torch.float32: torch.ones(shape, dtype=dtype, device=device)  # noqa: E731
    q, rows, e4m3 = make(2, 32, 2, 16), make(32, 2, 16), torch.float8_e4m3fn
    eight = q.to(e4m3)
    lengths = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    starts, used = lengths(0, 16, 32), lengths(16, 32)
    ours, varlen, sdpa = (
        flashcore_attn.flash_attn_func, flashcore_attn.flash_attn_varlen_func,
        flashcore_attn.scaled_dot_product_attention,
    )  # fmt: skip
    captured = lambda x: flashcore_attn.flex_attention(q, q, q, lambda s, b, h, i, j: s + x[i % 4])  # noqa: E731
    number = lambda x: flashcore_attn.flex_attention(q, q, q, lambda s, b, h, i, j: s * x)  # noqa: E731
    for i, name in enumerate("qkv"):
        at = lambda x, other, i=i: [x if i == j else other for j in range(3)]  # noqa: E731
        yield name, q, lambda x, at=at: ours(*at(x, q))
        yield name, q.half(), lambda x, at=at: sdpa(*at(x, q.half()))

        def to_eight(x, at=at):
            return flashcore_attn.quantize(*at(x, q))

        yield name, q, to_eight
        yield name, rows, lambda x, at=at: varlen(*at(x, rows), starts, starts)
        yield name, eight, lambda x, at=at: ours(*at(x, eight))
        factors = make(2, 2)

        def of_eight(x, name=name):
            return ours(eight, eight, eight, **{f"descale_{name}": x})

        yield f"descale_{name}", factors, of_eight
    yield "qkv", make(2, 8, 3, 2, 16), flashcore_attn.flash_attn_qkvpacked_func
    yield "kv", make(2, 8, 2, 2, 16), lambda x: flashcore_attn.flash_attn_kvpacked_func(q, x)
    yield "qkv", make(32, 3, 2, 16), lambda x: flashcore_attn.flash_attn_varlen_qkvpacked_func(x, starts)
    yield "kv", make(32, 2, 2, 16), lambda x: flashcore_attn.flash_attn_varlen_kvpacked_func(rows, x, starts, starts)
    for name, other in (("query", 0), ("key", 1), ("value", 2)):
        wide = lambda x, other=other: [x if other == j else make(3, 2, 2, 32, 16) for j in range(3)]  # noqa: E731
        yield name, make(1, 2, 2, 32, 16), lambda x, wide=wide: sdpa(*wide(x))
    for dtype in (torch.float32, torch.float16, torch.float64):
        yield "alibi_slopes", make(2, dtype=dtype), lambda x: ours(q, q, q, alibi_slopes=x)
        yield (
            "alibi_slopes",
            make(2, 2, dtype=dtype),
            lambda x: varlen(rows, rows, rows, starts, starts, alibi_slopes=x),
        )
        yield "learnable_sink", make(2, dtype=dtype), lambda x: ours(q, q, q, learnable_sink=x)
    for dtype in (torch.bool, torch.float32):
        yield "attn_mask", make(2, 2, dtype=dtype), lambda x: sdpa(q, q, q, x)
        yield "attn_mask", make(2, 32, 2, 2, dtype=dtype), lambda x: sdpa(q, q, q, x)
        yield "attn_mask", make(3, 1, 1, 2, 2, dtype=dtype), lambda x: sdpa(q.expand(3, 2, 32, 2, 16), q, q, x)
    yield "cu_seqlens_q", starts, lambda x: varlen(rows, q, q, x)
    yield "cu_seqlens_k", starts, lambda x: varlen(q, rows, rows, None, x)
    for name in ("seqused_q", "seqused_k", "leftpad_k"):
        yield name, used, lambda x, name=name: varlen(q, q, q, **{name: x})
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int16, torch.uint8):
        yield "a captured tensor", make(4, dtype=dtype), captured
        yield "a captured tensor", make(1, dtype=dtype), number
    blocks = {"kv_num_blocks": make(1, 1, 4).int(), "kv_indices": make(1, 1, 4, 4).int()}
    blocks |= {"full_kv_num_blocks": make(1, 1, 4).int(), "full_kv_indices": make(1, 1, 4, 4).int()}
    own = dict(zip(("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx"), blocks.values()))
    seen = make(2, 4, 32, 16)

    def of_blocks(name, x):
        mask = flex.BlockMask.from_kv_blocks(*blocks.values(), BLOCK_SIZE=8)
        setattr(mask, name, x)
        return flashcore_attn.flex_attention(seen, seen, seen, None, mask)

    def of_tensors(name, x):
        tensors = flashcore_attn.BlockSparseTensors(**{**own, name: x}, block_size=(8, 8))
        return flashcore_attn.flex_attention(seen, seen, seen, None, flashcore_attn.block_sparse_mask(None, tensors))

    for name, x in blocks.items():
        yield name, x, lambda x, name=name: of_blocks(name, x)
    for name, x in own.items():
        yield name, x, lambda x, name=name: of_tensors(name, x)


@every_tensor
@pytest.mark.parametrize("broken", [released, cut, spread])
def test_released_tensors_are_refused(tensors, broken):
    for name, accepted, call in calls(tensors):
        call(accepted)
        with pytest.raises(
            flashcore_attn.ArgumentError, match=f"^{name} ends at byte [0-9]+ of its storage, which has"
        ):
            call(broken(accepted))


@every_tensor
def test_zeros_without_memory_are_refused_or_computed(tensors):
    """PyTorch makes memory for them where a tensor is converted or copied first."""
    refused = set()
    for name, accepted, call in calls(tensors):
        try:
            out = call(never(accepted))
        except flashcore_attn.ArgumentError as error:
            told, _, words = str(error).partition(" has elements but no memory; ")
            assert told == name or (name in ("qkv", "kv") and told in name)
            assert words.startswith("expected a tensor with memory")
            refused.add(name)
        else:
            theirs = call(torch.zeros_like(accepted))
            assert all(torch.equal(x, y) for x, y in zip(out, theirs))
    assert len(refused) > 10


def calls(tensors):
    device = "cuda" if tensors.kind == "cuda" else "cpu"
    eight = device == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
    for name, accepted, call in operands(device):
        if eight or (accepted.dtype != torch.float8_e4m3fn and "eight" not in call.__name__):
            yield name, accepted, call


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def test_compat_leaves_zeros_without_memory_to_pytorch(device):
    q, zeros = (torch.ones(2, 4, 8, 16, device=device) for _ in range(2))
    flashcore_attn.compat.reset_stats()
    mask = never(torch.empty(8, 8, device=device))
    # PyTorch's own kernels may refuse a tensor without memory, and those of 2.11 read what is elsewhere.
    with flashcore_attn.compat.enabled():
        with contextlib.suppress(RuntimeError):
            F.scaled_dot_product_attention(q, q, never(zeros))
        with contextlib.suppress(RuntimeError):
            F.scaled_dot_product_attention(q, q, q, mask)
    assert flashcore_attn.compat.stats()["reasons"] == {"v": 1, "attn_mask": 1}


def test_numbers_whose_memory_was_released():
    q = torch.ones(1, 4, 2, 8)
    number, pair = released(torch.tensor(1)), released(torch.tensor([1, 1]))
    for name, options in {
        "softmax_scale": {"softmax_scale": number},
        "softcap": {"softcap": number},
        "causal": {"causal": number},
        "attention_chunk": {"attention_chunk": number},
        "dropout_p": {"dropout_p": number},
        "window_size": {"window_size": (number, number)},
        "window_size ": {"window_size": pair},
    }.items():
        with pytest.raises(flashcore_attn.ArgumentError, match=name.strip()):
            flashcore_attn.flash_attn_func(q, q, q, **options)
    with pytest.raises(flashcore_attn.ArgumentError, match="max_seqlen_k"):
        flashcore_attn.flash_attn_varlen_func(q, q, q, max_seqlen_k=number)


def test_operators_check_memory_too():
    """A direct call, and an element that ``torch.vmap`` hands over, reach no public function."""
    q = torch.ones(2, 2, 8, 16)
    terms = (1, False, -1, -1, None, 0.0, False)
    features = lambda sink, table: (None, None, None, None, None, 0, 0, 0, sink, "s + t0[0]", "", [], [], [table])  # noqa: E731
    call = torch.ops.flashcore_attn.attention_with
    end = (None, None, None, [0, 0, 0])
    sink, table = torch.zeros(2), torch.zeros(1)
    call(q, q, q, *terms, *features(sink, table), *end)
    for name, operands in (
        ("v", (q, q, released(q), *terms, *features(sink, table), *end)),
        ("sink", (q, q, q, *terms, *features(released(sink), table), *end)),
        ("table 0", (q, q, q, *terms, *features(sink, released(table)), *end)),
    ):
        with pytest.raises(flashcore_attn.ArgumentError, match=f"^{name} ends at byte"):
            call(*operands)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False), pytest.raises(flashcore_attn.ArgumentError, match="^k ends at byte"):
        flashcore_attn.scaled_dot_product_attention(q, torch._neg_view(released(q)), q)
    sdpa = torch.vmap(flashcore_attn.scaled_dot_product_attention)
    with pytest.raises(flashcore_attn.ArgumentError, match="^v ends at byte"):
        sdpa(q[None], q[None], released(q[None]))
    with pytest.raises(flashcore_attn.ArgumentError, match="^attn_mask ends at byte"):
        sdpa(q[None], q[None], q[None], released(torch.ones(1, 8, 8)))
    slopes = torch.vmap(lambda q, x: flashcore_attn.flash_attn_func(q, q, q, alibi_slopes=x))
    with pytest.raises(flashcore_attn.ArgumentError, match="^alibi_slopes ends at byte"):
        slopes(q[None], released(torch.ones(1, 8, dtype=torch.float64)))


def test_a_tensor_beyond_its_storage_is_refused_by_name():
    x = torch.randn(10000)[64 : 64 + 2048].view(1, 64, 2, 16)
    whole = torch.randn(1, 64, 2, 16)
    x.untyped_storage().resize_(0)
    for position, name in enumerate("qkv"):
        inputs = [whole, whole, whole]
        inputs[position] = x
        with pytest.raises(
            flashcore_attn.ArgumentError, match=f"^{name} ends at byte 8448 of its storage, which has 0 bytes"
        ):
            flashcore_attn.flash_attn_func(*inputs)
    # First one element too few, then just enough.
    flat = torch.randn(64 + 2048)
    view = flat[64:].view(1, 64, 2, 16)
    expected = flashcore_attn.flash_attn_func(view, view, view)
    flat.untyped_storage().resize_(8448)
    assert torch.equal(flashcore_attn.flash_attn_func(view, view, view), expected)
    flat.untyped_storage().resize_(8444)
    with pytest.raises(flashcore_attn.ArgumentError, match="8444 bytes"):
        flashcore_attn.flash_attn_func(view, view, view)


def test_a_tensor_beyond_its_storage_is_never_handed_to_a_gpu(pretended_gpu):
    x = torch.randn(1, 64, 2, 16, dtype=torch.float16)
    x.untyped_storage().resize_(16)
    with pytest.raises(flashcore_attn.ArgumentError, match="^q ends at byte 4096 of its storage, which has 16 bytes"):
        flashcore_attn.flash_attn_func(x, x, x)


class LiesOnShape(torch.Tensor):
    @property
    def shape(self):
        return torch.Size((1, 1 << 22, 2, 16))

    def stride(self, *dim):
        strides = ((1 << 22) * 32, 32, 16, 1)
        return strides[dim[0]] if dim else strides


def test_a_subclass_is_as_large_as_its_memory():
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 64, 2, 16)
    out = flashcore_attn.flash_attn_func(q, k.as_subclass(LiesOnShape), k.as_subclass(LiesOnShape))
    assert torch.equal(torch.Tensor.as_subclass(out, torch.Tensor), flashcore_attn.flash_attn_func(q, k, k))
