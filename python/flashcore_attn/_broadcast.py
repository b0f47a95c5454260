"""Leading dimensions that broadcast, as those of PyTorch's function do."""

from __future__ import annotations

from typing import Any

from ._errors import ArgumentError, dimensions

__all__ = ["broadcast", "leads_agree"]


def leads_agree(query: Any, key: Any, value: Any, enable_gqa: bool) -> bool:
    """Whether tensors of these shapes need no broadcasting."""
    q, k, v = query.shape, key.shape, value.shape
    if not (len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and k[1] == v[1]):
        return False
    return bool(q[1] == k[1] or (enable_gqa and k[1] and q[1] % k[1] == 0))


def broadcast(backend: Any, query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[Any, Any, Any, Any]:
    """The leading dimensions of the result, and the three tensors with exactly two of them (strides of 0 where one
    repeats)."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        least = 3 if enable_gqa else 2
        if tensor.ndim < least:
            raise ArgumentError(f"{name} has {dimensions(tensor.ndim)}; it needs at least {least}")
    own = 3 if enable_gqa else 2  # trailing dimensions that do not broadcast
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if enable_gqa:
        heads = [shape[-3] for shape in shapes.values()]
        if heads[1] != heads[2] or heads[1] == 0 or heads[0] % heads[1]:
            raise ArgumentError(
                f"query, key and value have {heads[0]}, {heads[1]} and {heads[2]} heads; "
                "enable_gqa=True needs as many key as value heads, and a divisor of the query heads"
            )
    lead = _broadcast_shapes({name: shape[:-own] for name, shape in shapes.items()})
    four = []
    for name, tensor in tensors.items():
        backend.check_given(name, tensor)
        wide = backend.expand(tensor, (*lead, *shapes[name][-own:]))
        dims = tuple(wide.shape)
        if len(dims) == 3:  # without enable_gqa, batch entries without heads
            dims = (1, *dims) if enable_gqa else (dims[0], 1, *dims[1:])
        elif len(dims) == 2:
            dims = (1, 1, *dims)
        batch = 1
        for extent in dims[:-3]:
            batch *= extent
        shape = (batch, *dims[-3:])
        # PyTorch gives dimensions of one other strides, and the output has the order of q's.
        four.append(wide if tuple(wide.shape) == shape else backend.reshape(wide, shape))
    result = (*lead, shapes["query"][-3]) if enable_gqa else lead
    return result, four[0], four[1], four[2]


def _broadcast_shapes(shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    longest = max(len(shape) for shape in shapes.values())
    padded = [(1,) * (longest - len(shape)) + shape for shape in shapes.values()]
    result = []
    for extents in zip(*padded):
        wide = [extent for extent in extents if extent != 1]
        if any(extent != wide[0] for extent in wide):
            listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            hint = "; fewer key than query heads need enable_gqa=True"
            raise ArgumentError(f"leading dimensions do not broadcast: {listed}{hint}")
        result.append(wide[0] if wide else 1)
    return tuple(result)
