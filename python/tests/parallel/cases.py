"""What the ranks compute: attention of a sharded sequence beside that of the whole sequence."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

import flashcore_attn
from flashcore_attn import parallel

ROWS = 37
DOCUMENTS = (0, 5, 6, 20, 37)
#: Options of the mask.
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window_size": (7, 0)},
    "both": {"window_size": (3, 4)},
    "right": {"window_size": (-1, 5)},
    "wide": {"window_size": (20, -1)},
    "chunk": {"attention_chunk": 8},
    "causal chunk": {"attention_chunk": 8, "causal": True},
}
#: Options of the score; tensors of them have gradients.
SCORES = ("plain", "softcap", "alibi", "alibi of batch", "sink", "sink and alibi", "scale")
SPLITS = ("zigzag", "contiguous", "zigzag of documents", "contiguous documents", "documents")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def split_of(name, ranks, rows=ROWS):
    kind, _, rest = name.partition(" ")
    documents = DOCUMENTS if rest or kind == "documents" else None
    return parallel.split_sequence(rows, ranks, kind, documents)


def score_of(name, heads, batch):
    draw = torch.Generator().manual_seed(7)
    slopes = torch.rand((heads,) if name != "alibi of batch" else (batch, heads), generator=draw)
    options = {"softmax_scale": 0.4} if name == "scale" else {"softcap": 2.0} if name == "softcap" else {}
    if "alibi" in name:
        options["alibi_slopes"] = slopes
    if "sink" in name:
        options["learnable_sink"] = torch.randn((heads,), generator=draw)
    return options


def drawn(batch, heads, heads_k, dim, dim_v, dtype):
    """q, k, v, the gradient of O and that of the log-sum-exp, of the whole sequence."""
    draw = torch.Generator().manual_seed(11)
    shapes = [(batch, ROWS, n, d) for n, d in ((heads, dim), (heads_k, dim), (heads_k, dim_v), (heads, dim_v))]
    tensors = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    return [*tensors, torch.randn((batch, heads, ROWS), generator=draw)]


def whole(split, tensors, options, dtype):
    """The results of one process: O, the log-sum-exp, and all gradients, in float32."""
    q, k, v, d_out, d_lse = tensors
    inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
    terms = {name: x.clone().requires_grad_() for name, x in options.items() if isinstance(x, torch.Tensor)}
    options = {**options, **terms}
    if len(split.documents) > 2:
        starts = torch.tensor(split.documents, dtype=torch.int32)
        made = flashcore_attn.flash_attn_varlen_func(
            *(x[0] for x in inputs), starts, starts, return_lse=True, **options
        )
        out, lse = (x[None] for x in made)
    else:
        out, lse = flashcore_attn.flash_attn_func(*inputs, return_lse=True, **options)
    torch.autograd.backward([out, lse], [d_out.to(dtype), d_lse])
    return [x.detach().float() for x in (out, lse, *(x.grad for x in (*inputs, *terms.values())))]


def sharded(group, split, tensors, options, schedule, slices):
    """The results of this rank, and the sums over ranks of the gradients of terms."""
    rank = dist.get_rank(group)
    q, k, v, d_out, d_lse = tensors
    inputs = [parallel.shard(x, split, rank).requires_grad_() for x in (q, k, v)]
    terms = {name: x.clone().requires_grad_() for name, x in options.items() if isinstance(x, torch.Tensor)}
    out, lse = parallel.context_parallel_attn_func(
        *inputs,
        group,
        split,
        schedule=schedule,
        head_slices=slices,
        return_lse=True,
        ulysses_degree=2 if schedule == "ulysses_ring" and dist.get_world_size(group) % 2 == 0 else None,
        **{**options, **terms},
    )
    torch.autograd.backward([out, lse], [parallel.shard(d_out, split, rank), parallel.shard(d_lse, split, rank, 2)])
    for x in terms.values():
        dist.all_reduce(x.grad, group=group)
    return [x.detach().float() for x in (out, lse, *(x.grad for x in (*inputs, *terms.values())))]


def compare(group, mask, score, split, schedule, dtype, heads_k, slices):
    """Asserts that each result of this rank has at most twice the error of one process."""
    ranks, rank, dtype = dist.get_world_size(group), dist.get_rank(group), DTYPES[dtype]
    split = split_of(split, ranks)
    batch = 1 if len(split.documents) > 2 else 2
    options = {**MASKS[mask], **score_of(score, 12, batch)}
    tensors = drawn(batch, 12, heads_k, 16, 8, dtype)
    exact = whole(split, tensors, options, torch.float32)
    single = whole(split, tensors, options, dtype)
    own = sharded(group, split, tensors, options, schedule, slices)
    used = sum(last - first for first, last in split.fragments[rank])
    names = ("out", "lse", "dq", "dk", "dv", "first term", "second term")
    for number, (name, found, right, beside) in enumerate(zip(names, own, exact, single)):
        if number < 5:
            dim = 2 if name == "lse" else 1
            right, beside = (parallel.shard(x, split, rank, dim) for x in (right, beside))
            assert (found.narrow(dim, used, split.rows - used) == (-math.inf if name == "lse" else 0)).all(), name
            found, right, beside = (x.narrow(dim, 0, used) for x in (found, right, beside))
        assert torch.equal(found.isinf(), right.isinf()), name
        error, accepted = (norm(x - right) for x in (found, beside))
        # Parts of a result are rounded before they are added.
        limit = 2 * accepted + 2e-6 * (1 + norm(right))
        assert error <= limit, f"{name}: an error of {error:.2e} instead of at most {limit:.2e}"


def norm(x):
    """The Frobenius norm. Differences of infinite elements are not numbers, and do not count."""
    return x.nan_to_num(0, 0, 0).norm().item()
