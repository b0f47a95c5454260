"""The backend of SGLang and that of diffusers on the CPU, against stubs of what they meet there."""

from __future__ import annotations

import enum
import inspect
import json
import math
import sys
import types
import typing
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flashcore_attn as fa  # noqa: E402
from flashcore_attn.engines import sglang  # noqa: E402

DIM, SLOTS, LONGEST = 16, 400, 64
RECORDED = json.loads((Path(__file__).parent / "data/engines.json").read_text())


def drawn(*shape, seed=0, dtype=torch.float16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def module(monkeypatch, name, **values):
    made = types.ModuleType(name)
    made.__path__ = []
    vars(made).update(values)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Pool:
    """Two pools per layer, token-major."""

    kv_cache_layout, dtype = "nhd", torch.float16

    def __init__(self):
        self.kv = drawn(SLOTS, 2, DIM, seed=1), drawn(SLOTS, 2, DIM, seed=2)

    def get_kv_buffer(self, layer):
        assert layer == 3
        return self.kv

    def set_kv_buffer(self, layer, where, k, v, k_scale, v_scale):
        for pool, new in zip(self.kv, (k, v)):
            pool[where.loc] = new


class Mode(enum.Enum):
    DECODE, EXTEND, IDLE, TARGET_VERIFY = range(4)

    def is_decode(self):
        return self is Mode.DECODE

    def is_extend(self):
        return self is Mode.EXTEND

    def is_mixed(self):
        return False

    def is_idle(self):
        return self is Mode.IDLE

    def is_decode_or_idle(self):
        return self in (Mode.DECODE, Mode.IDLE)


class Location:
    def __init__(self, loc):
        self.loc = loc


@pytest.fixture
def loaded(monkeypatch):
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention", "sglang.srt.mem_cache"):
        module(monkeypatch, name)

    def register(name):
        return lambda function: registry.ATTENTION_BACKENDS.setdefault(name, function)

    registry = module(
        monkeypatch, "sglang.srt.layers.attention.attention_registry", ATTENTION_BACKENDS={},
        register_attention_backend=register,
    )  # fmt: skip
    choices = []
    module(monkeypatch, "sglang.srt.arg_groups")
    module(monkeypatch, "sglang.srt.arg_groups.choices", add_attention_backend_choices=choices.extend)
    module(monkeypatch, "sglang.srt.layers.attention.base_attn_backend", AttentionBackend=object)
    module(monkeypatch, "sglang.srt.mem_cache.memory_pool", KVWriteLoc=Location)
    monkeypatch.delitem(sys.modules, "flashcore_attn.engines._sglang_backend", raising=False)
    sglang.register()
    sglang.register()
    assert choices == [sglang.NAME]
    yield registry.ATTENTION_BACKENDS[sglang.NAME]
    sys.modules.pop("flashcore_attn.engines._sglang_backend", None)


def runner(page, **changes):
    """A runner whose requests have pages in any order: ``req_to_token`` has each token's slot."""
    order = torch.randperm(SLOTS // page, generator=torch.Generator().manual_seed(4))
    per_request = LONGEST // page
    slots = (order[: 5 * per_request, None] * page + torch.arange(page)).reshape(5, LONGEST).to(torch.int32)
    named = {
        "token_to_kv_pool": Pool(), "page_size": page, "use_mla_backend": False,
        "req_to_token_pool": types.SimpleNamespace(req_to_token=slots),
        "model_config": types.SimpleNamespace(context_len=LONGEST),
    }  # fmt: skip
    return types.SimpleNamespace(**{**named, **changes})


def layer(**changes):
    named = {
        "tp_q_head_num": 4, "tp_k_head_num": 2, "tp_v_head_num": 2, "qk_head_dim": DIM, "v_head_dim": DIM,
        "scaling": 0.3, "sliding_window_size": -1, "logit_cap": 0.0, "layer_id": 3, "k_scale": None, "v_scale": None,
        "is_cross_attention": False, "attn_type": types.SimpleNamespace(value="decoder"),
    }  # fmt: skip
    return types.SimpleNamespace(**{**named, **changes})


def step(made, mode, requests, lengths, queries):
    rows = [int(made.req_to_token_pool.req_to_token[r, at]) for r, n, new in zip(requests, lengths, queries)
            for at in range(n - new, n)]  # fmt: skip
    return types.SimpleNamespace(
        forward_mode=mode, batch_size=len(requests), seq_lens=torch.tensor(lengths), out_cache_loc=torch.tensor(rows),
        req_pool_indices=torch.tensor(requests), extend_seq_lens=torch.tensor(queries), extend_seq_lens_cpu=queries,
    )  # fmt: skip


def check(made, out, q, requests, lengths, queries, window=-1, sinks=None, causal=True):
    """Against a reference in float64, on the pool that now has the new rows."""
    at = 0
    for request, length, new in zip(requests, lengths, queries):
        slots = made.req_to_token_pool.req_to_token[request, :length].long()
        k, v = (x[slots].double().repeat_interleave(2, 1) for x in made.token_to_kv_pool.kv)
        scores = torch.einsum("qhd,khd->hqk", q[at : at + new].double(), k) * 0.3
        apart = torch.arange(new)[:, None] + length - new - torch.arange(length)
        seen = (apart >= 0) | (not causal)
        seen &= (apart <= window) | (window < 0)
        scores = scores.masked_fill(~seen, -math.inf)
        mass = torch.logsumexp(scores, -1)
        mass = mass if sinks is None else torch.logaddexp(mass, sinks.double()[:, None])
        expected = torch.einsum("hqk,khd->qhd", torch.exp(scores - mass[..., None]), v)
        ours = out[at : at + new].view(new, 4, DIM).double()
        torch.testing.assert_close(ours, expected, rtol=4e-3, atol=4e-3)
        at += new


@pytest.mark.parametrize("page", [1, 8])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_extend_then_decode(loaded, page, options):
    made = runner(page)
    backend = loaded(made)
    sinks, window = options.get("sinks"), options.get("window", -1)
    requests, lengths, queries = [3, 0, 4], [9, 30, 17], [9, 4, 17]
    for mode in (Mode.EXTEND, Mode.DECODE, Mode.DECODE):
        batch = step(made, mode, requests, lengths, queries)
        backend.init_forward_metadata(batch)
        total = sum(queries)
        q, k, v = drawn(total, 4 * DIM, seed=total), *(drawn(total, 2, DIM, seed=s) for s in (8, 9))
        forward = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
        out = forward(q, k, v, layer(sliding_window_size=window), batch, sinks=sinks, score_mod=None)
        assert torch.equal(made.token_to_kv_pool.kv[0][batch.out_cache_loc], k)
        check(made, out, q.view(-1, 4, DIM), requests, lengths, queries, window, sinks)
        lengths, queries = [n + 1 for n in lengths], [1, 1, 1]


def test_a_graph_reads_memory_that_its_own_kernels_fill(loaded):
    made = runner(8)
    backend = loaded(made)
    backend.init_cuda_graph_state(8, 8)
    short = step(made, Mode.DECODE, [0, 0, 0], [backend.get_cuda_graph_seq_len_fill_value()] * 3, [1, 1, 1])
    backend.init_forward_metadata_out_graph(short, in_capture=True)
    captured = backend.forward_metadata
    for lengths in ([40, 9, 64], [3, 60, 2]):  # longer, and shorter
        batch = step(made, Mode.DECODE, [1, 2, 3], lengths, [1, 1, 1])
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
        assert backend.forward_metadata.table.data_ptr() == captured.table.data_ptr()
        q, k, v = drawn(3, 4 * DIM, seed=5), drawn(3, 2, DIM, seed=6), drawn(3, 2, DIM, seed=7)
        out = backend.forward_decode(q, k, v, layer(), batch)
        check(made, out, q.view(-1, 4, DIM), [1, 2, 3], lengths, [1, 1, 1])


def test_encoders_see_both_sides(loaded):
    made = runner(1)
    backend = loaded(made)
    batch = step(made, Mode.EXTEND, [2], [12], [12])
    backend.init_forward_metadata(batch)
    q, k, v = drawn(12, 4 * DIM, seed=5), drawn(12, 2, DIM, seed=6), drawn(12, 2, DIM, seed=7)
    encoder = layer(attn_type=types.SimpleNamespace(value="encoder_only"))
    check(made, backend.forward_extend(q, k, v, encoder, batch), q.view(-1, 4, DIM), [2], [12], [12], causal=False)


def test_refusals_name_what_is_not_known(loaded):
    class Hybrid(Pool):
        translate_loc_from_full_to_swa = None

    class Shuffled(Pool):
        kv_cache_layout = "vectorized_5d"

    speculative = types.SimpleNamespace(is_none=lambda: False)
    for changes, told in (
        ({"token_to_kv_pool": Shuffled()}, "vectorized_5d"), ({"use_mla_backend": True}, "MLA"),
        ({"token_to_kv_pool": Hybrid()}, "hybrid pool"), ({"spec_algorithm": speculative}, "speculative"),
    ):  # fmt: skip
        with pytest.raises(fa.UnsupportedError, match=told):
            loaded(runner(1, **changes))
    made = runner(1)
    backend = loaded(made)
    with pytest.raises(fa.UnsupportedError, match="TARGET_VERIFY"):
        backend.init_forward_metadata(step(made, Mode.TARGET_VERIFY, [0], [1], [1]))
    with pytest.raises(fa.UnsupportedError, match="EXTEND"):
        backend.init_forward_metadata_out_graph(step(made, Mode.EXTEND, [0], [1], [1]))
    batch = step(made, Mode.DECODE, [0], [3], [1])
    backend.init_forward_metadata(batch)
    q, k = drawn(1, 4 * DIM), drawn(1, 2, DIM)
    with pytest.raises(fa.UnsupportedError, match="the argument k_rope"):
        backend.forward_decode(q, k, k, layer(), batch, k_rope=k)
    with pytest.raises(fa.UnsupportedError, match="cross-attention"):
        backend.forward_decode(q, k, k, layer(is_cross_attention=True), batch)
    backend.init_forward_metadata(step(made, Mode.IDLE, [], [], []))
    assert backend.forward_metadata is None


@pytest.mark.parametrize("release", RECORDED["sglang"])
def test_the_signatures_of_releases(loaded, release):
    recorded = RECORDED["sglang"][release]
    backend = type(loaded(runner(1)))
    methods = recorded["classes"]["AttentionBackend"]
    for name in vars(backend):
        if name.startswith("_") or not callable(getattr(backend, name)):
            continue
        found = [x for x in inspect.signature(getattr(backend, name)).parameters if x not in ("self", "named")]
        assert found == methods[name]["arguments"], name
    used = {"forward_mode", "batch_size", "seq_lens", "seq_lens_cpu", "out_cache_loc", "req_pool_indices",
            "extend_seq_lens", "extend_seq_lens_cpu"}  # fmt: skip
    assert used <= set(recorded["batch"])
    assert "register_attention_backend" in recorded["registry"]
    assert "add_attention_backend_choices" in recorded["choices"]


# ---- diffusers


class Registry:
    """diffusers' registry: only parameters that a function names reach it."""

    backends: typing.ClassVar = {}

    @classmethod
    def register(cls, backend, constraints=None, supports_context_parallel=False):
        assert supports_context_parallel and constraints == []
        return lambda function: cls.backends.__setitem__(backend, function)


@pytest.fixture
def diffused(monkeypatch):
    Name = enum.Enum("Name", {"NATIVE": "native"}, type=str)

    def templated(q, k, v, mask, dropout_p, is_causal, scale, gqa, return_lse, *, forward_op, backward_op,
                  _parallel_config):  # fmt: skip
        """A ring of one process over two parts of the keys, as diffusers' own drives the operators."""

        class Ring(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                ctx.parts = [(k[:, at].contiguous(), v[:, at].contiguous()) for at in (slice(0, 5), slice(5, 11))]
                total = None
                for i, (a, b) in enumerate(ctx.parts):
                    out, lse = forward_op(ctx, q, a, b, None, 0.0, False, scale, gqa, True, _save_ctx=i == 0)
                    lse = lse[..., None]
                    if total is not None:
                        out = total[0] - torch.sigmoid(lse - total[1]) * (total[0] - out)
                        lse = total[1] - torch.nn.functional.logsigmoid(total[1] - lse)
                    total = (out, lse)
                ctx.q, ctx.out, ctx.lse = q, total[0], total[1][..., 0]
                return total[0]

            @staticmethod
            def backward(ctx, grad):
                found = [
                    backward_op(ctx, grad, query=ctx.q, key=a, value=b, out=ctx.out, lse=ctx.lse) for a, b in ctx.parts
                ]
                return sum(x[0] for x in found), *(torch.cat([x[i] for x in found], 1) for i in (1, 2))

        return Ring.apply(q, k, v)

    for name in ("diffusers", "diffusers.models"):
        module(monkeypatch, name)
    dispatch = module(
        monkeypatch, "diffusers.models.attention_dispatch", AttentionBackendName=Name,
        _AttentionBackendRegistry=Registry, _templated_context_parallel_attention=templated,
    )  # fmt: skip
    sys.modules["diffusers.models"].attention_dispatch = dispatch
    monkeypatch.delitem(sys.modules, "flashcore_attn.engines.diffusers", raising=False)
    from flashcore_attn.engines import diffusers

    yield diffusers, Name
    sys.modules.pop("flashcore_attn.engines.diffusers", None)


def test_diffusers_finds_the_backend_by_its_name(diffused):
    engine, names = diffused
    engine.register()
    assert names("flashcore") is names.FLASHCORE and [x.value for x in names] == ["native", "flashcore"]
    assert Registry.backends[names("flashcore")] is engine.attention
    recorded = next(iter(RECORDED["diffusers"].values()))
    assert set(recorded["flash"]) <= set(inspect.signature(engine.attention).parameters)
    assert recorded["registry"]["register"]["arguments"] == ["backend", "constraints", "supports_context_parallel"]


def test_diffusers_masks_and_windows(diffused):
    engine, _ = diffused
    q, k, v = (drawn(2, n, 4, DIM, seed=n, dtype=torch.float32) for n in (7, 11, 12))
    v = v[:, :11]
    mask = torch.rand(2, 1, 7, 11, generator=torch.Generator().manual_seed(3)) < 0.7
    ours = engine.attention(q, k, v, mask, scale=0.2)
    theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, scale=0.2)
    torch.testing.assert_close(ours, theirs.transpose(1, 2))
    out, lse = engine.attention(q, k, v, window_size=(3, 2), return_lse=True)
    assert torch.equal(out, fa.flash_attn_func(q, k, v, window_size=(3, 2))) and lse.shape == (2, 4, 7)
    with pytest.raises(fa.UnsupportedError, match="dropout_p"):
        engine.attention(q, k, v, dropout_p=0.1)
    with pytest.raises(fa.UnsupportedError, match="attn_mask beside return_lse"):
        engine.attention(q, k, v, mask, return_lse=True)


def test_diffusers_ring_has_gradients(diffused):
    engine, _ = diffused
    tensors, twins = (
        [drawn(2, n, 4, DIM, seed=n, dtype=torch.float32).requires_grad_() for n in (7, 11)] for _ in range(2)
    )
    for each in (tensors, twins):
        each.append(drawn(2, 11, 4, DIM, seed=1, dtype=torch.float32).requires_grad_())
    ours = engine.attention(*tensors, scale=0.2, _parallel_config=object())
    theirs = fa.flash_attn_func(*twins, softmax_scale=0.2)
    torch.testing.assert_close(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for a, b in zip(tensors, twins):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
