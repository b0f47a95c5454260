"""Gradients of attention of PyTorch tensors: the operator ``flashcore_attn::attention_backward``, and autograd.

The forward pass keeps its inputs, its output and the log-sum-exp, so that memory grows linearly with the sequence
length. All gradients are computed by one call. Equal calls return equal bits if that is asked for, and otherwise except
for dQ on a Hopper GPU, whose parts are added in the order in which they are ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, library

from . import _cuda, _features, _flashcore, _memory
from . import _torch as _calls
from ._errors import ArgumentError, DTypeError, UnsupportedError, invalid_words

if TYPE_CHECKING:
    from ._features import Features
    from ._flashcore import Terms

#: The reason in ``compat.stats()``.
REASON = "requires_grad"
# The places of the sinks and of the tables among the arguments of `flashcore_attn::attention_with`.
_SINK, _TABLES = 18, 23


class Wants(NamedTuple):
    """The gradients besides those of q, k and v: of the sinks, and bit ``i`` for that of table ``i``."""

    sink: bool = False
    tables: int = 0


_NONE = Wants()


def needed(tensors: tuple[Tensor, ...]) -> bool:
    """Whether autograd records a call of such tensors."""
    if not torch.is_grad_enabled():
        return False
    # The tensors of `torch.vmap` inside of a derivative do not show whether they require grad.
    hidden = not torch.compiler.is_compiling() and _cuda._functorch() is not None and _calls.hides_derivatives()
    return hidden or any(x.requires_grad for x in tensors)


def check(q: Tensor, k: Tensor, v: Tensor, features: Features | None) -> None:
    """Rejects calls whose gradients are not computed, before anything is computed.

    Raises:
        UnsupportedError: 8-bit tensors, descale factors that require grad, programs that cannot be differentiated, and
            on a GPU what its kernels lack.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype in _cuda.FP8:
            raise UnsupportedError(f"{name} is of {x.dtype}, and 8-bit tensors have no gradients", REASON)
    wants, stated = Wants(), features or _features.Features()
    for name, x in zip(_features.SCALES, stated.scales):
        if x is not None and x.requires_grad:
            raise UnsupportedError(f"{name} requires grad, and descale factors have no gradients; detach it", REASON)
    if stated.page_table is not None:
        raise UnsupportedError("keys in pages have no gradients; use torch.no_grad(), or detach the inputs", REASON)
    if features is not None:
        wants = Wants(stated.sink is not None and stated.sink.requires_grad, _bits(stated.tables))
    told = _lacks(q, v, stated, wants)
    if told is not None:
        words = "an input requires grad, and its gradient is not computed"
        raise UnsupportedError(f"{words}: {told}; use torch.no_grad(), or detach the inputs", REASON)


def _bits(tables: tuple[Tensor, ...]) -> int:
    return sum(1 << i for i, x in enumerate(tables) if x.is_floating_point() and x.requires_grad)


def _lacks(q: Tensor, v: Tensor, stated: Features, wants: Wants) -> str | None:
    """Why the gradients of a call are not computed, or None."""
    if q.dtype not in _cuda.DTYPES or q.device.type not in ("cuda", "cpu"):
        return None  # the call is refused in any case
    on_gpu = q.device.type == "cuda"
    if not on_gpu and not (stated.score or stated.mask):
        return None
    return _lacks_gradients(
        q.get_device() if on_gpu else None,
        # On the CPU, sizes that vary between calls of a graph decide nothing.
        (int(q.shape[3]), int(v.shape[3])) if on_gpu else (8, 8),
        _cuda._CODES[q.dtype],
        (stated.score, stated.mask),
        (len(stated.floats), len(stated.ints)),
        tuple((_cuda._TABLE_CODES[x.dtype], x.ndim) for x in stated.tables),
        (stated.sink is not None, wants.sink),
        wants.tables,
        stated.deterministic or torch.are_deterministic_algorithms_enabled(),
    )


def lacks(q: Tensor, v: Tensor, dtype: torch.dtype, mask: Tensor | None) -> str | None:
    """The reason for which a GPU does not compute the gradients of a call with a mask, or None."""
    programs: tuple[str, str] = ("", "")
    tables: tuple[tuple[int, int], ...] = ()
    if mask is not None:
        programs = ("", "n0[q, k] != 0") if mask.dtype == torch.bool else ("s + t0[q, k]", "")
        tables = ((_cuda._TABLE_CODES.get(mask.dtype, 0), 2),)
    dims = (int(q.shape[-1]), int(v.shape[-1]))
    told = _lacks_gradients(
        q.get_device(), dims, _cuda._CODES[dtype], programs, (0, 0), tables, (False, False),
        int(mask is not None and mask.requires_grad), True,
    )  # fmt: skip
    return None if told is None else REASON


def _lacks_gradients(ordinal: int | None, *call: Any) -> str | None:
    dims, code, programs, numbers, tables, sinks, of_tables, deterministic = call
    return _flashcore.lacks_gradients(
        ordinal, (dims, code, programs, numbers, list(tables), sinks, of_tables, deterministic)
    )


# Marks it as `torch.compiler.assume_constant_result` does: it is called while a graph is traced.
_lacks_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Saved(NamedTuple):
    """What the forward pass leaves: its inputs and results."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def compute(
    d_out: Tensor,
    d_lse: Tensor | None,
    saved: Saved,
    heads: int,
    terms: Terms,
    features: Features | None,
    wants: Wants = _NONE,
    deterministic: bool | None = None,
    into: tuple[Tensor | None, ...] = (None, None, None),
) -> list[Tensor]:
    """The gradients of q, k and v, then those that are wanted: of the sinks, and of tables in float32. ``into`` has
    memory for the first three, with contiguous rows. Packed rows may lack the dimension of the batch entries."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    q = saved.q
    if q.is_cuda and q.get_device() != _cuda._current_device():
        with torch.cuda.device(q.get_device()):
            return compute(d_out, d_lse, saved, heads, terms, features, wants, deterministic, into)
    uneven = features is not None and features.uneven
    # Rows of no sequence have no gradient, and a call without rows writes nothing.
    clear = uneven or not saved.out.numel()
    tables = [] if features is None else features.tables
    numbers = [i for i in range(len(tables)) if wants.tables >> i & 1]
    sinks = [q.new_empty((q.shape[heads - 4],), dtype=torch.float32)] if wants.sink else []
    sums = [q.new_empty(_summed(tables[i]), dtype=torch.float32) for i in numbers]
    if clear:
        for x in (*sinks, *sums):
            x.zero_()
    held: list[Any] = []
    others = (
        _memory.address("d_sinks", sinks[0], held) if sinks else None,
        [(i, _memory.address("d_table", x, held)) for i, x in zip(numbers, sums)],
    )
    results = None
    if _calls.eager is not None:
        results = _calls.eager.gradients(
            d_out, d_lse, saved, into, heads, terms, deterministic, uneven, features, others
        )  # fmt: skip
    if results is None:
        given = (*_with_entries(d_out, d_lse, saved), into)
        results = _computed(given, heads, terms, features, deterministic, clear, others)
        results = [dx if dx.ndim == x.ndim else dx[0] for dx, x in zip(results, saved)]
    return [*results, *sinks, *(_of_table(x, tables[i]) for i, x in zip(numbers, sums))]


def _with_entries(d_out: Tensor, d_lse: Tensor | None, saved: Saved) -> tuple[Tensor, Tensor | None, Saved]:
    """The tensors with a dimension of batch entries, which those of packed rows may lack."""
    q, k, v, out, lse = saved
    k, v = (x[None] if x.ndim == 3 else x for x in (k, v))
    if q.ndim == 3:
        d_out, d_lse = d_out[None], None if d_lse is None else d_lse[None]
        q, out, lse = q[None], out[None], lse[None]
    return d_out, d_lse, Saved(q, k, v, out, lse)


def _computed(
    given: tuple[Tensor, Tensor | None, Saved, tuple[Tensor | None, ...]],
    heads: int,
    terms: Terms,
    features: Features | None,
    deterministic: bool,
    clear: bool,
    others: tuple[int | None, list[tuple[int, int]]],
) -> list[Tensor]:
    """The gradients of q, k and v of a call that Rust does not read. ``others`` are the addresses of the gradients of
    sinks and tables."""
    d_out, d_lse, saved, into = given
    q, features = saved.q, features and _dense(features)
    _check_gradient("d_out", d_out, saved.out, saved.out.dtype)
    code, _ = _cuda.codes(q, saved.k, saved.v)
    plain = [_cuda.plain_rows(name, _cuda.resolved(name, x)) for name, x in zip(Saved._fields, saved[:4])]
    if saved.lse.numel() == 0 and saved.out.numel():  # the forward pass was not asked for it
        lse = _calls._now(plain[0], plain[1], plain[2], heads, terms, True, features)[1]
        assert lse is not None
    else:
        lse = saved.lse.contiguous()
    _check_gradient("lse", lse, _cuda.lse_like(q, heads), torch.float32)
    d_out = _cuda.plain_rows("d_out", _cuda.resolved("d_out", d_out))
    if d_lse is not None:
        _check_gradient("d_lse", d_lse, lse, torch.float32)
        d_lse = _cuda.resolved("d_lse", d_lse).contiguous()
    results = [_cuda.output_like(x, x.shape[3]) if memory is None else memory for x, memory in zip(plain, into)]
    if clear:
        for x in results:
            x.zero_()
    held: list[Any] = []

    def at(name: str, x: Tensor) -> int:
        return _memory.address(name, x, held)

    place = (q.get_device(), _cuda._current_stream(q.get_device())) if q.is_cuda else (None, torch.get_num_threads())
    _cuda._attend(
        (at("q", plain[0]), plain[0].shape, plain[0].stride()),
        (at("k", plain[1]), plain[1].shape, plain[1].stride()),
        (at("v", plain[2]), plain[2].shape, plain[2].stride()),
        (at("out", plain[3]), plain[3].stride()),
        at("lse", lse),
        heads,
        code,
        terms,
        place,
        None if features is None else _cuda.describe(features, q, held),
        None,
        (
            deterministic,
            (at("d_out", d_out), d_out.stride()),
            None if d_lse is None else at("d_lse", d_lse),
            [(at(f"d{name}", x), x.stride()) for name, x in zip("qkv", results)],
            *others,
        ),
    )
    return results


def _summed(table: Tensor) -> list[int]:
    """The shape of a table's gradient as it is computed: a dimension that repeats has one element, the sum."""
    return [min(extent, 1) if stride == 0 else extent for extent, stride in zip(table.shape, table.stride())]


def _of_table(summed: Tensor, table: Tensor) -> Tensor:
    """The gradient in the shape of its table: that of one of the elements that repeat has the sum."""
    if summed.shape == table.shape:
        return summed
    whole = summed.new_zeros(table.shape)
    whole[tuple(slice(extent) for extent in summed.shape)] = summed
    return whole


def _check_gradient(name: str, x: Tensor, like: Tensor, dtype: torch.dtype) -> None:
    _cuda.check_given(name, x)
    if x.shape != like.shape:
        raise ArgumentError(invalid_words(f"the shape of {name}", tuple(x.shape), f"{tuple(like.shape)}"))
    if x.dtype != dtype:
        raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, str(dtype)))
    if x.device != like.device:
        raise ArgumentError(f"{name} is on {x.device}, q on {like.device}; they must be on one device")


@library.custom_op(
    "flashcore_attn::attention_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int heads, "
    "bool top_left, SymInt before, SymInt after, float? scale, float softcap, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? leftpad_k, SymInt batch, SymInt max_q, "
    "SymInt max_k, Tensor? sink, str score, str mask, float[] floats, SymInt[] ints, Tensor[] tables, bool of_sink, "
    "int of_tables, bool deterministic, float dropout_p=0.0, Tensor? rng_state=None) -> Tensor[]",
)
def _operator(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    heads: int,
    *rest: Any,
) -> list[Tensor]:
    terms, features = rest[:5], rest[5:]
    stated, (of_sink, of_tables, deterministic) = list(features[:14]), features[14:17]
    dropout_p, state = features[17:] or (0.0, None)
    plain = [_calls._plain(x) for x in (d_out, d_lse, q, k, v, out, lse)]
    _calls._check_axes(plain[2], plain[3], plain[4], heads)
    made = None
    if state is not None or _has_features(stated):
        others = (None, None, None, [0, 0, 0], None, False, dropout_p, _calls._plain(state))
        made = _calls._stated((*map(_calls._plain, stated), *others))
        _calls._check_features(plain[2], plain[3], plain[4], heads, made)
    return compute(
        plain[0], plain[1], Saved(*plain[2:]), heads, terms, made,
        Wants(of_sink, of_tables), deterministic,
    )  # fmt: skip


def _dense(features: Features) -> Features:
    """The features with arrays that kernels read: a hook of saved tensors may return others."""
    lengths: Any = tuple(None if x is None else x.contiguous() for x in features.lengths)
    sink, state = (None if x is None else x.contiguous() for x in (features.sink, features.rng_state))
    return features._replace(lengths=lengths, sink=sink, rng_state=state)


def _has_features(stated: list[Any]) -> bool:
    *lengths, _, _, _, sink, score, mask, _, _, _ = stated
    return bool(sink is not None or score or mask or any(x is not None for x in lengths))


@_operator.register_fake
def _fake(d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    tables, of_sink, of_tables = rest[21:24]
    results = [_cuda.output_like(_cuda.plain_rows(name, x), x.shape[3]) for name, x in (("q", q), ("k", k), ("v", v))]
    if of_sink:
        results.append(q.new_empty((q.shape[rest[2]],), dtype=torch.float32))
    return [*results, *(x.new_empty(x.shape, dtype=torch.float32) for i, x in enumerate(tables) if of_tables >> i & 1)]


def _twice(ctx: Any, *grads: Any) -> Any:
    raise UnsupportedError("the gradients of attention cannot be differentiated: there is no double backward", REASON)


_operator.register_autograd(_twice)


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, heads, *terms = inputs[:9]
    features = inputs[10:]
    *lengths, batch, max_q, max_k, sink, score, mask, floats, ints, tables = features[:14] or (
        *(None,) * 5, 0, 0, 0, None, "", "", [], [], [],
    )  # fmt: skip
    ctx.set_materialize_grads(False)
    ctx.dropout_p, state = features[20:22] or (0.0, None)
    ctx.save_for_backward(q, k, v, *output, *lengths, sink, state, *tables)
    ctx.heads, ctx.terms = heads, terms
    ctx.sizes, ctx.programs = (batch, max_q, max_k), (score, mask, floats, ints)
    ctx.blocks, ctx.deterministic = features[17:18], any(features[19:20])


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, needs: Any = None) -> tuple[Any, ...]:
    deterministic = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
    q, k, v, out, lse, *rest = ctx.saved_tensors
    (*lengths, sink, state), tables = rest[:7], rest[7:]
    with_features = len(ctx.blocks) > 0
    needs = ctx.needs_input_grad if needs is None else needs
    of_sink = with_features and sink is not None and bool(needs[_SINK])
    of_tables = 0
    if with_features:
        of_tables = sum(1 << i for i, wanted in enumerate(needs[_TABLES]) if wanted)
    if d_out is None:
        d_out = torch.zeros_like(out)
    dq, dk, dv, *others = called(
        torch.ops.flashcore_attn.attention_backward, d_out, d_lse, q, k, v, out, lse, ctx.heads, *ctx.terms, *lengths,
        *ctx.sizes, sink, *ctx.programs, list(tables), of_sink, of_tables, deterministic, ctx.dropout_p, state,
    )  # fmt: skip
    found: list[Any] = [dq, dk, dv, *(None,) * 7]
    if not with_features:
        return tuple(found)
    d_sink = others.pop(0) if of_sink else None
    d_tables = [others.pop(0).to(x.dtype) if of_tables >> i & 1 else None for i, x in enumerate(tables)]
    *_, floats, ints = ctx.programs
    # An empty list is one of tensors for autograd.
    lists: tuple[Any, Any] = (None if floats else [], None if ints else [])
    gradients = (*found, *(None,) * 8, d_sink, None, None, *lists, d_tables, *(None,) * 9)
    # PyTorch drops last arguments that equal their defaults; older versions take no gradients for those.
    return gradients[: len(needs)]


class _Recorded(torch.autograd.Function):  # type: ignore[misc]
    """A call on plain tensors, without the dispatcher, which takes longer than a small call."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Any, *tables: Tensor) -> Any:
        heads, terms, features, others, made = call
        out, lse = _calls._now(q, k, v, heads, terms, True, features) if made is None else made
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, sink, *tables, *others)
        if made is None and features is not None:
            # Without the tensors, which must not be kept twice.
            bare = {"lengths": _features.NO_LENGTHS, "sink": None, "tables": (), "rng_state": None}
            features = features._replace(**bare)
        ctx.call = heads, terms, features
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> Any:
        kept = ctx.saved_tensors  # once: hooks may give them once only
        if _calls.eager is not None:
            deterministic = torch.are_deterministic_algorithms_enabled()
            found = _calls.eager.recorded(ctx.call, kept, d_out, d_lse, deterministic)
            if found is not None:
                return found
        return _Recorded._gradients(ctx, kept, d_out, d_lse)

    @staticmethod
    def _gradients(ctx: Any, kept: tuple[Tensor, ...], d_out: Tensor | None, d_lse: Tensor | None) -> Any:
        q, k, v, out, lse, sink, *rest = kept
        heads, terms, features = ctx.call
        needs = ctx.needs_input_grad
        tables = rest[: len(needs) - 5]
        wants = Wants(sink is not None and needs[3], sum(1 << i for i, wanted in enumerate(needs[5:]) if wanted))
        if d_out is None:
            d_out = torch.zeros_like(out)
        if features is not None:
            *lengths, state = rest[len(tables) :]
            given = {"lengths": tuple(lengths), "sink": sink, "tables": tuple(tables), "rng_state": state}
            features = features._replace(**given)
        asked = features is not None and features.deterministic
        deterministic = asked or torch.are_deterministic_algorithms_enabled()
        saved = Saved(q, k, v, out, lse)
        if torch.is_grad_enabled():  # for a second derivative, which the operator refuses
            stated = _calls._flat(features or _features.Features())
            d_out, d_lse, saved = _with_entries(d_out, d_lse, saved)
            found = torch.ops.flashcore_attn.attention_backward(
                d_out, d_lse, *saved, heads, *terms, *stated[:14], *wants, deterministic, *stated[20:22]
            )
        else:
            found = compute(d_out, d_lse, saved, heads, terms, features, wants, deterministic)
        dq, dk, dv, *others = found
        dq, dk, dv = (dx if dx.ndim == x.ndim else dx[0] for dx, x in zip((dq, dk, dv), (q, k, v)))
        d_sink = others.pop(0) if wants.sink else None
        d_tables = [others.pop(0).to(x.dtype) if wanted else None for x, wanted in zip(tables, needs[5:])]
        return (dq, dk, dv, d_sink, None, *d_tables)


# PyTorch's method looks for a function of its own each time.
_Recorded._backward_cls.apply = _Recorded.backward

# `torch.autograd.Function.apply` without what it does for the transforms of `torch.func`, under which Rust
# makes no calls.
record = super(torch.autograd.Function, _Recorded).apply


def recorded(
    q: Tensor, k: Tensor, v: Tensor, heads: int, terms: Terms, features: Features | None
) -> tuple[Tensor, Tensor]:
    """The result and the log-sum-exp of a call on plain tensors that autograd records."""
    if features is None:
        out, lse = _Recorded.apply(q, k, v, None, (heads, terms, None, (), None))
    else:
        others = (*features.lengths, features.rng_state)
        out, lse = _Recorded.apply(q, k, v, features.sink, (heads, terms, features, others, None), *features.tables)
    return out, lse


def without_tensors(
    sizes: tuple[int, int, int],
    programs: tuple[str, str, tuple[int, ...]],
    table: str,
    deterministic: bool,
    dropout_p: float,
) -> Features:
    """The features of a call that Rust has made."""
    (score, mask, ints), names = programs, (table,) if table else ()
    return _features.Features(
        _features.NO_LENGTHS, *sizes, None, score, mask, (), ints, deterministic=deterministic, names=names,
        dropout_p=dropout_p,
    )  # fmt: skip


def called(operator: Any, *arguments: Any) -> Any:
    """The results of an operator. PyTorch's derivatives of functions need a Function, which takes no lists."""
    if torch.compiler.is_compiling() or _cuda._functorch() is None or not _calls.is_differentiated():
        return operator(*arguments)
    backward = operator is torch.ops.flashcore_attn.attention_backward
    if backward:
        return _Backward.apply(*_split(arguments, -len(arguments)))
    return _Forward.apply(*_split(arguments, len(arguments)))


# The place of the tables among the arguments of an operator, by their number, which is negative for the
# gradients.
_PLACES = {33: _TABLES, -32: 26}


def _split(arguments: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """The arguments behind their number, the tables behind the others."""
    if (place := _PLACES.get(number)) is None:
        return (number, *arguments)
    return (number, *arguments[:place], *arguments[place + 1 :], *arguments[place])


def _joined(split: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """Values for the arguments as an operator has them, of values for :func:`_split` ones."""
    values = split[1:]
    if (place := _PLACES.get(number)) is None:
        return values
    return (*values[:place], list(values[abs(number) - 1 :]), *values[place : abs(number) - 1])


def _forward_of(number: int) -> Any:
    return torch.ops.flashcore_attn.attention_with if number in _PLACES else torch.ops.flashcore_attn.attention


class _Forward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(*split: Any) -> Any:
        return _forward_of(split[0])(*_joined(split, split[0]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.number = inputs[0]
        _set_up(ctx, _joined(inputs, ctx.number), output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = _differentiate(ctx, grads[0], grads[1], _joined(ctx.needs_input_grad, ctx.number))
        return (None, *(None if isinstance(x, list) else x for x in _split(found, ctx.number)[1:]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *split: Any) -> Any:
        return _of_each(_forward_of(split[0]), info, in_dims, split)


class _Backward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(*split: Any) -> Any:
        return tuple(torch.ops.flashcore_attn.attention_backward(*_joined(split, split[0])))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(_twice)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *split: Any) -> Any:
        found, dims = _of_each(torch.ops.flashcore_attn.attention_backward, info, in_dims, split)
        return tuple(found), tuple(dims)


def _of_each(operator: Any, info: Any, in_dims: Any, split: tuple[Any, ...]) -> Any:
    number = split[0]
    call = lambda *arguments: called(operator, *arguments)  # noqa: E731
    return _calls._mapped(operator, call)(info, _joined(in_dims, number), *_joined(split, number))


def register(operators: tuple[Any, Any]) -> None:
    """Registers the gradients of both operators of the forward pass."""
    for operator in operators:
        operator.register_autograd(_differentiate, setup_context=_set_up)
    if hasattr(_operator, "register_vmap"):
        _operator.register_vmap(_calls._mapped(torch.ops.flashcore_attn.attention_backward))
