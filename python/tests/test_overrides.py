"""Classes of tensors and modes that give PyTorch's functions another meaning, and the function that ``compat`` puts
into PyTorch's place."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import threading

import pytest

import flashcore_attn

torch = pytest.importorskip("torch")
F = torch.nn.functional
flex = pytest.importorskip("torch.nn.attention.flex_attention")
bias = pytest.importorskip("torch.nn.attention.bias")
TORCH_SDPA, TORCH_FLEX = F.scaled_dot_product_attention, flex.flex_attention
compat = flashcore_attn.compat


@pytest.fixture(autouse=True)
def pytorchs_functions(fresh_counts):
    """PyTorch's functions are in place after each test."""
    yield
    assert F.scaled_dot_product_attention is TORCH_SDPA and flex.flex_attention is TORCH_FLEX


def ones_and_threes(keys=2):
    """q and k of zeros, and rows of v 1, 3, 5, …: each row is the mean of the values that it sees."""
    value = torch.arange(1.0, 2 * keys, 2)[:, None].expand(keys, 8)
    return torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, keys, 8), value[None, None]


def ran(code):
    """The output of a program that runs in its own process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


CAUSAL = [
    (bias.causal_upper_left, 2, [1.0, 2.0]),
    (bias.causal_upper_left, 4, [1.0, 2.0]),
    (bias.causal_lower_right, 2, [1.0, 2.0]),
    (bias.causal_lower_right, 4, [3.0, 4.0]),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("make", "keys", "expected"), CAUSAL)
def test_a_mask_of_a_class_of_its_own_keeps_its_meaning(make, keys, expected, compiled):
    q, k, v = ones_and_threes(keys)
    mask = make(2, keys)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask)

    with compat.enabled(), torch.no_grad():
        run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
        out = run(q, k, v)
        assert F.scaled_dot_product_attention is not TORCH_SDPA
    assert type(out) is torch.Tensor and out[0, 0, :, 0].tolist() == expected
    assert compat.stats()["reasons"] == ({} if compiled else {"type CausalBias": 1})


class Overriding(torch.Tensor):
    """A class whose memory is not what it stands for."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = {"in place": F.scaled_dot_product_attention, "original": TORCH_SDPA}
        seen = [name for name, known in found.items() if function is known]
        return torch.full((1,), 10.0 * len(seen)) if seen else super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_class_sees_the_function_that_pytorch_calls(compiled):
    q = torch.randn(1, 2, 4, 8)
    of_class = torch.zeros(4, 4).as_subclass(Overriding)

    def attend(q, mask):
        return F.scaled_dot_product_attention(q, q, q, mask)

    with compat.enabled(), torch.no_grad():
        run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
        assert run(q, of_class).item() == 20.0
        for position in range(3):
            tensors = [q, q, q]
            tensors[position] = q.as_subclass(Overriding)
            assert F.scaled_dot_product_attention(*tensors).item() == 20.0
    assert compat.stats()["reasons"] == {"type Overriding": 3 if compiled else 4}


def test_operands_whose_class_overrides_functions_are_refused_by_name():
    q = torch.randn(2, 6, 4, 16)
    rows, heads = q[0], q.transpose(1, 2)
    q8 = flashcore_attn.quantize(q, q, q)
    make = lambda x: x.as_subclass(Overriding)  # noqa: E731
    starts, used = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([2, 6], dtype=torch.int32)
    captured, call = make(torch.randn(4)), flashcore_attn.flash_attn_func
    packed = flashcore_attn.flash_attn_varlen_func
    for refused, name in (
        (
            lambda: flashcore_attn.scaled_dot_product_attention(heads, heads, heads, make(torch.zeros(6, 6))),
            "attn_mask",
        ),
        (lambda: call(q, q, q, alibi_slopes=make(torch.ones(4))), "alibi_slopes"),
        (lambda: call(q, q, q, learnable_sink=make(torch.ones(4))), "learnable_sink"),
        (lambda: packed(rows, rows, rows, make(starts), starts), "cu_seqlens_q"),
        (lambda: packed(rows, rows, rows, starts, make(starts)), "cu_seqlens_k"),
        (lambda: packed(q, q, q, seqused_q=make(used)), "seqused_q"),
        (lambda: packed(q, q, q, seqused_k=make(used)), "seqused_k"),
        (lambda: packed(q, q, q, seqused_k=used, leftpad_k=make(used)), "leftpad_k"),
        (lambda: call(q8.q, q8.k, q8.v, descale_k=make(q8.descale_k)), "descale_k"),
        (
            lambda: flashcore_attn.flex_attention(heads, heads, heads, lambda s, b, h, i, j: s + captured[h]),
            "a captured tensor",
        ),
    ):
        words = f"^invalid value 'Overriding' for the type of {name}: expected torch.Tensor"
        with pytest.raises(flashcore_attn.UnsupportedError, match=words) as error:
            refused()
        assert error.value.reason == "type Overriding"
    with compat.enabled(), pytest.raises(flashcore_attn.UnsupportedError, match="'CausalBias' for the type of"):
        mask = bias.causal_upper_left(6, 6)
        flashcore_attn.scaled_dot_product_attention(heads, heads, heads, mask)


class Twice(torch.Tensor):
    """A class with an operator's meaning of its own: an operator sees the double of what the tensor was made of."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        open_ = lambda x: x.inner * 2 if isinstance(x, Twice) else x  # noqa: E731
        return function(*torch.utils._pytree.tree_map(open_, args), **(kwargs or {}))


def test_classes_that_dispatch_operators_are_asked():
    q, sink = torch.randn(1, 5, 2, 8), torch.randn(2)
    out = flashcore_attn.flash_attn_func(q, Twice(q), q, learnable_sink=Twice(sink))
    torch.testing.assert_close(out, flashcore_attn.flash_attn_func(q, q * 2, q, learnable_sink=sink * 2))
    table = torch.randn(2)
    slopes = flashcore_attn.flash_attn_func(q, q, q, alibi_slopes=Twice(table))
    torch.testing.assert_close(slopes, flashcore_attn.flash_attn_func(q, q, q, alibi_slopes=table * 2))


class Marking(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention and function is TORCH_SDPA:
            return torch.full((1,), 7.0)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["eager", "beside a device", "compiled", "inside of compiled code"])
def test_a_mode_decides_what_a_function_means(where):
    q = torch.randn(1, 2, 4, 8)

    def attend(q):
        return F.scaled_dot_product_attention(q, q, q)

    def marked(q):
        with Marking():
            return F.scaled_dot_product_attention(q, q, q)

    with compat.enabled(), torch.no_grad():
        if where == "inside of compiled code":
            out = torch.compile(marked, fullgraph=True, backend="aot_eager")(q)
        elif where == "beside a device":
            with torch.device("cpu"):
                out = marked(q)
        else:
            run = attend if where == "eager" else torch.compile(attend, fullgraph=True, backend="aot_eager")
            with Marking():
                out = run(q)
    assert out.item() == 7.0
    counted = where in ("eager", "beside a device")
    assert compat.stats()["reasons"] == ({"mode Marking": 1} if counted else {})


def test_a_mode_is_seen_in_code_that_is_compiled_first_thing_in_a_process():
    """PyTorch lists the functions that a mode may override when it first compiles, which is after `enable` here."""
    code = """
import torch, flashcore_attn
from torch.nn import functional as F
class Marking(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return torch.full((1,), 7.0)
        return function(*args, **(kwargs or {}))
def marked(q):
    with Marking():
        return F.scaled_dot_product_attention(q, q, q)
flashcore_attn.compat.enable()
print(torch.compile(marked, fullgraph=True, backend="eager")(torch.randn(1, 2, 4, 8)).item())
print(torch.overrides.resolve_name(torch._C._nn.scaled_dot_product_attention))
"""
    assert ran(code).split() == ["7.0", "torch.nn.functional.scaled_dot_product_attention"]


class Listing(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class OwnDevice(torch.utils._device.DeviceContext):
    """A mode that is no longer only a device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (
            torch.full((1,), 5.0)
            if function is TORCH_SDPA
            else super().__torch_function__(function, types, args, kwargs)
        )


def test_modes_are_known_by_their_exact_class():
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.randn(1, 2, 4, 8)
    listing = Listing()
    with compat.enabled(), torch.no_grad():
        with listing:
            F.scaled_dot_product_attention(q, q, q)
        assert not any("flashcore" in name for name in listing.seen) and listing.seen
        with OwnDevice("cpu"):
            assert F.scaled_dot_product_attention(q, q, q).item() == 5.0
        assert compat.stats()["reasons"] == {"mode Listing": 1, "mode OwnDevice": 1}
        compat.reset_stats()
        with torch.device("cpu"):
            F.scaled_dot_product_attention(q, q, q)
        with FlopCounterMode(display=False) as counter:
            F.scaled_dot_product_attention(q, q, q)
        torch.utils.checkpoint.checkpoint(F.scaled_dot_product_attention, q, q, q, use_reentrant=False)
    assert compat.stats() == {"calls": 3, "flashcore": 3, "fallback": 0, "reasons": {}}
    assert counter.get_total_flops() == 2 * 2 * 2 * 4 * 4 * 8


def test_a_mode_sees_the_operator_of_a_direct_call():
    q, seen = torch.randn(1, 4, 2, 8), []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watching():
        flashcore_attn.flash_attn_func(q, q, q)
    assert any("flashcore_attn.attention" in name for name in seen)
    torch.set_default_device("cpu")  # a mode, too
    try:
        assert flashcore_attn.quantize(q, q, q).q.shape == q.shape
    finally:
        torch.set_default_device(None)


def test_flex_attention_under_a_mode_is_pytorchs():
    q = torch.randn(1, 2, 16, 16)
    with compat.enabled(), torch.no_grad(), Marking():
        assert flex.flex_attention.original is TORCH_FLEX
        torch.testing.assert_close(flex.flex_attention(q, q, q), TORCH_FLEX(q, q, q))
    assert compat.stats()["reasons"] == {"mode Marking": 1}


def test_the_function_in_place_has_the_names_of_pytorchs():
    with compat.enabled():
        for module, original in ((F, TORCH_SDPA), (flex, TORCH_FLEX)):
            ours = getattr(module, original.__name__)
            assert ours is not original
            for name in ("__name__", "__qualname__", "__module__", "__doc__"):
                assert getattr(ours, name) == getattr(original, name), name
            assert pickle.loads(pickle.dumps(ours)) is ours is copy.copy(ours) is copy.deepcopy(ours)
        kept = F.scaled_dot_product_attention
        saved = pickle.dumps(kept)
        assert inspect.signature(flex.flex_attention) == inspect.signature(TORCH_FLEX)
        with pytest.raises(ValueError, match="no signature found"):  # as of any function of C
            inspect.signature(kept)
        q = torch.zeros(1, 1, 2, 8)
        with pytest.raises(TypeError):  # PyTorch takes the scale by name only
            kept(q, q, q, None, 0.0, False, 0.5)

        class Holder:
            attend = F.scaled_dot_product_attention  # a function of C does not become a method

        assert Holder().attend(q, q, q).shape == q.shape
    assert pickle.loads(saved) is TORCH_SDPA is copy.deepcopy(kept)
    assert torch.equal(kept(q, q, q), TORCH_SDPA(q, q, q)) and compat.stats()["calls"] == 1


def test_context_parallel_distributes_what_is_called():
    """PyTorch's own context parallelism replaces the function by its `__name__`. Before, it replaced another name."""
    code = """
import torch, torch.distributed as dist, torch.nn.functional as F, flashcore_attn.compat as compat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, q = init_device_mesh("cpu", (1,)), torch.randn(2, 4, 8, 16)
parallel = lambda: context_parallel(mesh, buffers=[torch.zeros(2, 4, 8, 16)], buffer_seq_dims=[2])
original = F.scaled_dot_product_attention
def attend():
    try:
        return F.scaled_dot_product_attention(q, q, q).shape
    except NotImplementedError as error:  # on the CPU PyTorch has no rule for its operator
        return str(error)
with torch.no_grad(), parallel():
    expected = attend()
with torch.no_grad(), compat.enabled():
    ours = F.scaled_dot_product_attention
    with parallel():
        print(F.scaled_dot_product_attention is not ours, attend() == expected)
    print(F.scaled_dot_product_attention is ours, compat.stats()["reasons"])
with parallel():
    try:
        compat.enable()
    except NotImplementedError as error:
        print(str(error).startswith("torch.nn.functional.scaled_dot_product_attention is replaced by torch.distr"))
print(F.scaled_dot_product_attention is original, compat.stats()["calls"])
"""
    assert ran(code).splitlines() == ["True True", "True {'type DTensor': 1}", "True", "True 1"]


def test_another_librarys_function_is_not_replaced(monkeypatch):
    def theirs(*args, **kwargs):
        return "theirs"

    with monkeypatch.context() as patch:
        patch.setattr(flex, "flex_attention", theirs)
        with pytest.raises(
            flashcore_attn.UnsupportedError, match=r"flex_attention is replaced by test_overrides\."
        ) as error:
            compat.enable()
        assert error.value.reason == "replaced" and F.scaled_dot_product_attention is TORCH_SDPA
    # One that stands in front of FlashCore's stays, and calls it.
    with compat.enabled():
        ours = F.scaled_dot_product_attention
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", lambda *args: ours(*args))
            with compat.enabled():
                q = torch.randn(1, 1, 4, 8)
                F.scaled_dot_product_attention(q, q, q)
    assert compat.stats()["flashcore"] == 1


def test_compat_is_disabled_and_enabled_while_a_class_is_asked():
    """The class finds PyTorch's function in place meanwhile, in any thread."""
    entered, leave, found = threading.Event(), threading.Event(), []

    class Waiting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is TORCH_SDPA:
                found.append(F.scaled_dot_product_attention is TORCH_SDPA)
                entered.set()
                leave.wait(60)
                found.append(F.scaled_dot_product_attention is TORCH_SDPA)
                return 1
            return super().__torch_function__(function, types, args, kwargs or {})

    q = torch.randn(1, 1, 4, 8)
    for change in (lambda: None, compat.disable, lambda: (compat.disable(), compat.enable())):
        entered.clear()
        leave.clear()
        compat.enable()
        ours = F.scaled_dot_product_attention
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q.as_subclass(Waiting), q, q))
        thread.start()
        assert entered.wait(60)
        change()
        F.scaled_dot_product_attention(q, q, q)
        leave.set()
        thread.join()
        if change is not compat.disable:
            assert F.scaled_dot_product_attention is ours
            compat.disable()
        assert F.scaled_dot_product_attention is TORCH_SDPA
    assert found == [True] * 6


@pytest.mark.parametrize("compiled", [False, True])
def test_derivatives_around_a_map(compiled):
    """The tensors of `torch.vmap` do not show that something outside of it requires their derivatives."""
    q = torch.randn(2, 2, 4, 8)

    def summed(x, attend):
        return torch.vmap(lambda x: attend(x, x, x))(x).sum()

    expected = torch.func.grad(summed)(q, TORCH_SDPA)
    with compat.enabled():
        run = torch.func.grad(lambda x: summed(x, lambda *three: F.scaled_dot_product_attention(*three)))
        run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
        torch.testing.assert_close(run(q), expected)
    assert compat.stats()["flashcore"] == (0 if compiled else 1) and not compat.stats()["reasons"]
    torch.testing.assert_close(torch.func.grad(summed)(q, flashcore_attn.scaled_dot_product_attention), expected)
    constant = torch.func.grad(lambda x: summed(q, flashcore_attn.scaled_dot_product_attention) * x)(torch.ones(()))
    torch.testing.assert_close(constant, summed(q, TORCH_SDPA))


def test_truth_values_that_pytorch_refuses():
    q = torch.randn(1, 1, 4, 8)
    with compat.enabled():
        for name in ("is_causal", "enable_gqa"):
            with pytest.raises(TypeError, match=name):
                F.scaled_dot_product_attention(q, q, q, **{name: 1})
    assert compat.stats()["reasons"] == {"is_causal": 1, "enable_gqa": 1}


class Special(torch.nn.Parameter):
    pass


def test_a_score_function_may_name_a_class_of_tensors():
    q = torch.randn(1, 2, 4, 8)
    score = lambda s, b, h, i, j: s + Special(torch.arange(4.0), requires_grad=False)[j]  # noqa: E731
    out = flashcore_attn.flex_attention(q, q, q, score)
    torch.testing.assert_close(out, flashcore_attn.flex_attention(q, q, q, lambda s, b, h, i, j: s + j * 1.0))


def test_what_stands_for_a_tensor_in_a_trace_is_refused_by_name():
    with pytest.raises(flashcore_attn.ArgumentError, match="invalid value 'Proxy' for the type of query"):
        torch.fx.symbolic_trace(lambda q: flashcore_attn.scaled_dot_product_attention(q, q, q))
    code = """
import flashcore_attn, torch
class Like:
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return 1
for _ in range(2):  # the first call imports the functions for PyTorch's tensors
    try:
        flashcore_attn.flash_attn_func(Like(), Like(), Like())
    except flashcore_attn.ArgumentError as error:
        print(str(error)[:39])
"""
    assert ran(code).splitlines() == ["invalid value 'Like' for the type of q:"] * 2
