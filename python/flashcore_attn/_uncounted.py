"""The reasons why ``compat`` saw no call, as far as this process shows them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

from ._replaced import Replacement

__all__ = ["reasons"]


def reasons(functions: tuple[Replacement, ...], was_enabled: bool) -> list[str]:
    """A sentence for each reason that applies. Looks through all modules and objects of the process.

    ``was_enabled``: whether compat was enabled since the counts began, and may be disabled again.
    """
    torch = sys.modules.get("torch")
    if torch is None or not was_enabled:
        return ["compat is not enabled now: call compat.enable(), or the model inside of compat.enabled()"]
    found = [*_of_modules(torch), *_imported_before(functions), *_replaced_since(functions), *_compiled()]
    if any(function.active for function in functions):
        none = "no call of scaled_dot_product_attention or flex_attention reached PyTorch while compat was enabled"
        return [*found, *_fast_path(torch)] or [none]
    return [*found, "compat is disabled again: only calls between enable() and disable() are routed"]


def _imported_before(functions: tuple[Replacement, ...]) -> Iterator[str]:
    """Modules that hold PyTorch's function under a name of their own."""
    modules = {id(module): (name, module) for name, module in reversed(list(sys.modules.items()))}  # once each
    for module_name, module in reversed(list(modules.values())):
        # Models that use this integration are named by `_of_modules`.
        is_theirs = module_name == "transformers.integrations.flex_attention"
        if is_theirs or module_name.partition(".")[0] in ("torch", "flashcore_attn") or module is None:
            continue
        for name, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
            if any(value is function.original for function in functions if function.original is not None):
                words = "was imported before compat.enable(), so its calls stay PyTorch's; enable compat first"
                yield f"{module_name}.{name} {words}"


def _replaced_since(functions: tuple[Replacement, ...]) -> Iterator[str]:
    for function in functions:
        if function.active and not function.in_place():
            yield f"{function.path} was replaced by another library after compat.enable()"


def _of_modules(torch: Any) -> Iterator[str]:
    """Modules of PyTorch and models of transformers that call another function."""
    transformers = sys.modules.get("transformers.modeling_utils")
    model_class = getattr(transformers, "PreTrainedModel", None)
    others: dict[str, set[str]] = {}
    has_weights = False
    for found in gc.get_objects():
        kind = type(found)
        if issubclass(kind, torch.nn.MultiheadAttention):
            has_weights = True
        elif model_class is not None and issubclass(kind, model_class):
            used = getattr(getattr(found, "config", None), "_attn_implementation", "sdpa")
            if used != "sdpa":
                others.setdefault(used, set()).add(kind.__name__)
    for used, names in sorted(others.items()):
        words = 'import flashcore_attn.integrations.transformers, and call model.set_attn_implementation("flashcore")'
        theirs = f"attention of {', '.join(sorted(names))} is '{used}'"
        if used == "flashcore":
            yield f"{theirs}, which calls FlashCore without PyTorch's function: such calls are not counted"
        else:
            yield f"{theirs}, not PyTorch's function; {words}"
    if has_weights:
        yield "nn.MultiheadAttention with need_weights=True computes its weights itself; pass need_weights=False"


def _fast_path(torch: Any) -> Iterator[str]:
    if torch.backends.mha.get_fastpath_enabled():
        words = "compat.enable() had turned it off; call torch.backends.mha.set_fastpath_enabled(False)"
        yield f"PyTorch's fast path of nn.MultiheadAttention and nn.TransformerEncoder is on again, and {words}"


def _compiled() -> Iterator[str]:
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["stats"]["calls_captured"]:
        yield "calls inside of torch.compile are not counted: whether one is routed is decided when it is traced"
