"""The other implementations of attention, and how to call each one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from flashcore_attn._errors import invalid

from ._problem import FP8, Problem

Attention = Callable[[Any, Any, Any], Any]


class Peer:
    """One implementation.

    ``layout`` is its order of dimensions, ``bhsd`` or ``bshd``. ``load`` imports it and returns a function of q, k and
    v for a problem, or raises an error that says why it cannot compute the problem. ``context`` is entered around
    calls. ``out`` is the type of its output if that is not the problem's.
    """

    def __init__(
        self,
        key: str,
        layout: str,
        load: Callable[[Problem], Attention],
        version: Callable[[], str],
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        out: str | None = None,
    ) -> None:
        self.key, self.layout, self.load, self.context, self.out = key, layout, load, context, out
        self._version = version

    @property
    def name(self) -> str:
        """The name in rows, with the version if it is known."""
        try:
            return f"{self.key} {self._version()}"
        except Exception:
            return self.key


# Largest score matrix of the unfused path, bytes. A larger one would only show that memory runs out.
_MATH_BYTES = 1 << 30


def _sdpa(problem: Problem) -> Attention:
    _needs_16_bits(problem)
    _needs_plain_scores(problem)
    if not problem.aligned_as("causal-top-left"):
        raise NotImplementedError("its causal mask is aligned to the top left")
    options: dict[str, Any] = {"is_causal": problem.causal}
    if problem.heads_q != problem.heads_kv:
        options["enable_gqa"] = True
    function = torch.nn.functional.scaled_dot_product_attention
    return lambda q, k, v: function(q, k, v, **options)


def _math(problem: Problem) -> Attention:
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv * 4
    if scores > _MATH_BYTES:
        raise NotImplementedError(f"sdpa-math would store {scores / 2**30:.1f} GB of scores; expected at most 1 GB")
    return _sdpa(problem)


def _flex(problem: Problem) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if problem.dtype not in ("f32", "tf32"):
        raise NotImplementedError("it is raced on f32 and tf32 only")
    _needs_plain_scores(problem)
    blocks, compiled = None, torch.compile(flex_attention, dynamic=False)
    if problem.causal:
        offset = 0 if "top-left" in problem.mask else problem.seq_kv - problem.seq_q
        blocks = create_block_mask(
            lambda b, h, q, k: q + offset >= k, None, None, problem.seq_q, problem.seq_kv, device="cuda"
        )
    grouped = problem.heads_q != problem.heads_kv
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=grouped)


def _flash_attention_3(problem: Problem) -> Attention:
    _needs_bottom_right(problem)
    options: dict[str, Any] = {"window_size": problem.window or (-1, -1), "softcap": problem.softcap or 0.0}
    if problem.dtype in FP8:
        # Builds for inference omit 8-bit kernels; builds of the upstream package have them.
        from flash_attn_interface import flash_attn_func

        ones = torch.ones(problem.batch, problem.heads_kv, device="cuda", dtype=torch.float32)
        options |= {"q_descale": ones, "k_descale": ones, "v_descale": ones}
    else:
        from fa3_fwd_interface import flash_attn_func
    return lambda q, k, v: _first(flash_attn_func(q, k, v, causal=problem.causal, **options))


def _flash_attention_4(problem: Problem) -> Attention:
    from flash_attn.cute import flash_attn_func

    _needs_16_bits(problem)
    _needs_bottom_right(problem)
    window = tuple(None if keys < 0 else keys for keys in problem.window or (-1, -1))
    options: dict[str, Any] = {"window_size": window, "softcap": problem.softcap or 0.0}
    return lambda q, k, v: _first(flash_attn_func(q, k, v, causal=problem.causal, **options))


# The factor by which cuDNN's softmax is multiplied before it is rounded to e4m3, whose largest number is 448.
_CUDNN_P = 256.0


def _cudnn_fp8(problem: Problem) -> Attention:
    """cuDNN's 8-bit attention. On Hopper its output is e4m3 as well."""
    import cudnn

    if problem.dtype != "e4m3":
        raise NotImplementedError("it is raced on e4m3 only")
    if problem.causal and problem.seq_q != problem.seq_kv:
        raise NotImplementedError("its causal mask is raced on equal lengths only")
    _needs_plain_scores(problem)
    handle, eight, single = cudnn.create_handle(), cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=eight, intermediate_data_type=single, compute_data_type=single)
    p = problem
    shapes = [(p.batch, heads, seq, p.head_dim) for heads, seq in ((p.heads_q, p.seq_q), *[(p.heads_kv, p.seq_kv)] * 2)]
    rows = [[heads * seq * dim, dim, heads * dim, 1] for _, heads, seq, dim in shapes]  # as (b, s, h, d) in memory
    inputs = [graph.tensor(dim=list(of), stride=to, data_type=eight) for of, to in zip(shapes, rows)]
    one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": single}
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: graph.tensor(**one) for name in names}
    q, k, v = inputs
    out, _, largest_s, largest_o = graph.sdpa_fp8(
        q=q, k=k, v=v, **scales, attn_scale=p.head_dim**-0.5, use_causal_mask=p.causal, generate_stats=False
    )
    out.set_output(True).set_dim(list(shapes[0])).set_stride(rows[0]).set_data_type(eight)
    for largest in (largest_s, largest_o):
        largest.set_output(True).set_dim(one["dim"]).set_stride(one["stride"]).set_data_type(single)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(graph.get_workspace_size(), 16), device="cuda", dtype=torch.uint8)
    values = dict.fromkeys(names, 1.0) | {"scale_s": _CUDNN_P, "descale_s": 1 / _CUDNN_P}
    held: dict[Any, Any] = {scales[name]: torch.full((1, 1, 1, 1), x, device="cuda") for name, x in values.items()}
    held |= {largest: torch.empty(1, 1, 1, 1, device="cuda") for largest in (largest_s, largest_o)}

    def call(*tensors: Any) -> Any:
        result = torch.empty_like(tensors[0])
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(held | dict(zip(inputs, tensors)) | {out: result}, workspace, handle=handle)
        return result

    return call


def _xformers(problem: Problem) -> Attention:
    import xformers.ops as ops

    if problem.heads_q != problem.heads_kv:
        raise NotImplementedError("it takes grouped heads as five dimensions; not tried")
    _needs_16_bits(problem)
    _needs_plain_scores(problem)
    top_left = problem.aligned_as("causal-top-left")
    mask = ops.LowerTriangularMask if top_left else ops.fmha.attn_bias.LowerTriangularFromBottomRightMask
    bias, kernel = mask() if problem.causal else None, (ops.fmha.cutlass.FwOp, None)
    return lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=bias, op=kernel)


def _needs_16_bits(problem: Problem) -> None:
    if problem.dtype in FP8:
        raise NotImplementedError("it has no 8-bit inputs")


def _needs_plain_scores(problem: Problem) -> None:
    if problem.window is not None or problem.softcap is not None:
        raise NotImplementedError("it has neither sliding windows nor a softcap")


def _needs_bottom_right(problem: Problem) -> None:
    if not problem.aligned_as("causal"):
        raise NotImplementedError("its causal mask is aligned to the bottom right")


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _torch_version() -> str:
    return str(torch.__version__)


def _cudnn_version() -> str:
    number = torch.backends.cudnn.version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _installed(*names: str) -> Callable[[], str]:
    def version() -> str:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as of

        for name in names:
            try:
                return of(name)
            except PackageNotFoundError:
                continue
        raise PackageNotFoundError(names[0])

    return version


def _backend(name: str) -> Callable[[], AbstractContextManager[Any]]:
    def context() -> AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen: AbstractContextManager[Any] = sdpa_kernel(getattr(SDPBackend, name))
        return chosen

    return context


PEERS = (
    Peer("sdpa-flash", "bhsd", _sdpa, _torch_version, _backend("FLASH_ATTENTION")),
    Peer("sdpa-cudnn", "bhsd", _sdpa, _cudnn_version, _backend("CUDNN_ATTENTION")),
    Peer("sdpa-efficient", "bhsd", _sdpa, _torch_version, _backend("EFFICIENT_ATTENTION")),
    Peer("sdpa-math", "bhsd", _math, _torch_version, _backend("MATH")),
    Peer("flex", "bhsd", _flex, _torch_version),
    Peer("cudnn-fp8", "bshd", _cudnn_fp8, _cudnn_version, out="e4m3"),
    Peer("fa3", "bshd", _flash_attention_3, _installed("flash-attn-3", "fa3-fwd", "flash_attn_3")),
    Peer("fa4", "bshd", _flash_attention_4, _installed("flash-attn-4", "flash-attn-cute", "flash-attn")),
    Peer("xformers", "bshd", _xformers, _installed("xformers")),
)


def chosen(keys: str | None) -> list[Peer]:
    """The peers of a list of names; all if None, none for ``none``.

    Raises:
        ValueError: with what is accepted.
    """
    if keys is None:
        return list(PEERS)
    wanted = [] if keys == "none" else keys.split(",")
    known = {peer.key: peer for peer in PEERS}
    unknown = [key for key in wanted if key not in known]
    if unknown:
        raise invalid("peers", unknown[0], ", ".join((*known, "none")))
    return [known[key] for key in wanted]
