"""Values of every kind in the place of each argument: a call computes or raises an error of FlashCore."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import flashcore_attn as fa

torch = pytest.importorskip("torch")

BATCH, ROWS, HEADS, HEADS_K, DIM, PAGE = 2, 5, 4, 2, 16, 4


def calls():
    """Public functions with arguments that fit."""
    q, k = torch.ones(BATCH, ROWS, HEADS, DIM), torch.ones(BATCH, ROWS, HEADS_K, DIM)
    bhsd = {"query": q.transpose(1, 2), "key": k.transpose(1, 2), "value": k.transpose(1, 2), "enable_gqa": True}
    pages, kv = torch.ones(4, PAGE, HEADS_K, DIM), torch.ones(BATCH, ROWS, 2, HEADS_K, DIM)
    lengths, table = torch.tensor([5, 6], dtype=torch.int32), torch.tensor([[0, 1], [0, 3]], dtype=torch.int32)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    one = torch.tensor([0, 1, 2], dtype=torch.int32)
    angles = torch.ones(9, 4)
    lists = fa.BlockSparseTensors(*(torch.zeros(1, 1, 1, *last, dtype=torch.int32) for last in ((), (1,))))
    cached = {"k_cache": pages, "v_cache": pages, "cache_seqlens": lengths, "page_table": table}
    rotary = {"rotary_cos": angles, "rotary_sin": angles}
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    new = {"k": k[:, :1], "v": k[:, :1]}
    return {
        "flash_attn_func": {"q": q, "k": k, "v": k},
        "scaled_dot_product_attention": bhsd,
        "flex_attention": bhsd,
        "flash_attn_varlen_func": {"q": q[0], "k": k[0], "v": k[0], **packed},
        "flash_attn_varlen_func of pages": {"q": q, "k": pages, "v": pages, "seqused_k": lengths, "block_table": table},
        "flash_attn_with_kvcache": {"q": q[:, :1], **cached},
        "flash_attn_with_kvcache that appends": {"q": q[:, :1], **cached, **new, **rotary},
        "flash_attn_with_kvcache of packed rows": {
            "q": q[:, 0], **cached, "k": k[:, 0], "v": k[:, 0], "cu_seqlens_q": one, "cu_seqlens_k_new": one,
        },
        "flash_attn_with_shared_prefix": {"q": q[:, :1], **cached, "prefix_len": PAGE},
        "flash_attn_qkvpacked_func": {"qkv": torch.ones(BATCH, ROWS, 3, HEADS, DIM)},
        "flash_attn_kvpacked_func": {"q": q, "kv": kv},
        "flash_attn_varlen_qkvpacked_func": {"qkv": torch.ones(ROWS, 3, HEADS, DIM), "cu_seqlens": starts},
        "flash_attn_varlen_kvpacked_func": {"q": q[0], "kv": kv[0], **packed},
        "merge_states": {"outs": [q, q], "lses": [torch.ones(BATCH, HEADS, ROWS)] * 2},
        "reshape_and_cache": {
            "key": k[0], "value": k[0], "key_cache": pages, "value_cache": pages, "slot_mapping": torch.arange(ROWS),
        },
        "unpad_input": {"hidden_states": q, "attention_mask": torch.ones(BATCH, ROWS, dtype=torch.int64)},
        "pad_input": {"hidden_states": q[0], "indices": torch.arange(ROWS), "batch": 2, "seqlen": 3},
        "quantize": {"q": q, "k": k, "v": k},
        "block_sparse_mask": {"mask_mod": None, "tensors": lists, "block_size": (8, 8)},
        "explain": {"q": q, "k": k, "v": k},
    }  # fmt: skip


def values():
    """Values of every kind; few of them fit an argument."""
    floats = [torch.zeros(shape) for shape in ((), (0,), (2,), (4,), (2, 4), (1, 1, 1, 1, 1, 1))]
    integers = [torch.tensor(x, dtype=torch.int32) for x in (1, [0, 9], [0, -9, 2])]
    rows = (BATCH, ROWS, HEADS_K, DIM)
    others = [torch.zeros(rows, dtype=dtype) for dtype in (torch.float64, torch.float8_e4m3fn, torch.bool)]
    others += [torch.zeros(rows, device="meta"), torch.zeros(3).to_sparse(), torch.zeros(rows, requires_grad=True)]
    arrays = [np.float32(0.5), np.array([1, 2]), np.zeros(rows, np.float32)]
    numbers = [True, 1, 0, -1, 1.5, float("nan"), 2**70, 1j]
    plain = [None, "a", "", [1], (), {}, object(), torch.float32]
    return [*numbers, *plain, *arrays, *floats, *integers, torch.tensor([5, 1, 2]), *others]


@pytest.mark.parametrize("name", calls())
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_every_value_in_place_of_every_argument(name, library):
    function = getattr(fa, name.split()[0])
    if library == "numpy" and function in (fa.reshape_and_cache, fa.block_sparse_mask, fa.explain):
        return  # which take PyTorch's tensors alone
    for argument in inspect.signature(function).parameters:
        for value in values():
            given = calls()[name]
            if library == "numpy":
                given = {key: as_numpy(x) for key, x in given.items()}
                value = as_numpy(value)
            try:
                function(**{**given, argument: value})
            except fa.FlashCoreError:
                pass
            except Exception as error:
                raise AssertionError(f"{argument} = {value!r}") from error


def as_numpy(x):
    if isinstance(x, list):
        return [as_numpy(each) for each in x]
    try:
        return x.numpy() if isinstance(x, torch.Tensor) else x
    except (RuntimeError, TypeError):  # of a tensor that NumPy cannot hold
        return x
