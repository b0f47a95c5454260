"""FlexAttention on PyTorch tensors against PyTorch's own, ``compat``, and compiled calls with features."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

import flashcore_attn

torch = pytest.importorskip("torch")
F = torch.nn.functional
flex = pytest.importorskip("torch.nn.attention.flex_attention")
TORCH_FLEX, TORCH_SDPA = flex.flex_attention, F.scaled_dot_product_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)]


def three(rows=50, keys=70, heads=4, heads_k=4, dim=32, batch=2, device="cpu", dtype=torch.float32):
    generator = torch.Generator(device=device).manual_seed(0)
    make = lambda h, s: torch.randn(batch, h, s, dim, generator=generator, device=device).to(dtype)  # noqa: E731
    return make(heads, rows), make(heads_k, keys), make(heads_k, keys)


def causal(b, h, q, k):
    return q + 20 >= k


def tanh_cap(score, b, h, q, k, cap=3.0):
    return cap * torch.tanh(score / cap)


def functions(device):
    """Score functions as users of FlexAttention write them."""
    slopes = torch.exp2(-torch.arange(1, 5, device=device).float())
    relative = torch.randn(4, 121, device=device)
    table = torch.randn(2, 4, 50, 70, device=device)
    offset = torch.tensor(2.5, device=device)
    kept = torch.rand(2, 70, device=device) > 0.3
    documents = torch.randint(0, 4, (70,), device=device)
    shorts = torch.randint(0, 3, (4,), device=device, dtype=torch.int16)
    places = torch.randn(70, 3, device=device)
    return {
        "identity": lambda score, b, h, q, k: score,
        "cap": tanh_cap,
        "partial": functools.partial(tanh_cap, cap=1.5),
        "alibi": lambda score, b, h, q, k: score + slopes[h] * (k - q),
        "relative": lambda score, b, h, q, k: score + relative[h, q - k + 70],
        "table": lambda score, b, h, q, k: score + table[b, h, q, k],
        "nested index": lambda score, b, h, q, k: score + table[b][h][q][k],
        "a tensor of one element": lambda score, b, h, q, k: score * offset,
        "negative index": lambda score, b, h, q, k: score + slopes[h - 4],
        "where": lambda score, b, h, q, k: torch.where(kept[b, k], score, -float("inf")),
        "documents": lambda score, b, h, q, k: torch.where(documents[q] == documents[k], score, score - 1.0),
        "functions": lambda score, b, h, q, k: torch.sigmoid(score) + torch.exp(-score.abs()) + torch.log(score**2 + 1),
        "clamp": lambda score, b, h, q, k: torch.clamp(score, -0.5, 0.5) + torch.minimum(q, k).clamp(max=5),
        "integers": lambda score, b, h, q, k: score + (q // 3 - k % 7) * (h ^ 1) + (q << 1) / (1 + (k >> 2)),
        "casts": lambda score, b, h, q, k: score + (q - k).to(torch.float32) / 7 + (q >= k).to(score.dtype),
        "floor": lambda score, b, h, q, k: torch.floor(score * 3) + torch.ceil(-score) + score % 2 - score // 0.7,
        "rounding": lambda score, b, h, q, k: torch.floor(score * 3) + score * torch.ceil(-score) + score % 2,
        "method where": lambda score, b, h, q, k: score.where(q >= k, -1.0) + offset.where(q > k, h),
        "sums of truth values": lambda score, b, h, q, k: (
            score + ((q >= k) + (k >= h)) + torch.where((q > k) * (h > 1), 2, 0) + torch.maximum(q > k, h > 1)
        ),
        "names of arguments": lambda score, b, h, q, k: (
            F.relu(score) + torch.pow(score, exponent=2) + torch.div(score, other=2.0) + torch.abs(input=score)
            + torch.where(condition=q >= k, input=score, other=1.0) + score.sub(other=1, alpha=2)
            + torch.clamp(input=score, min=None, max=0.5)
        ),
        "logical": lambda score, b, h, q, k: torch.where(
            torch.logical_or(torch.logical_not(q > k), torch.logical_and(h == 1, kept[b, k])), score, score / 2
        ),
        "waves": lambda score, b, h, q, k: torch.cos(score * 40) + torch.sin(q * 0.7 - k) + score.cos() * score.sin(),
        "logarithm near 1": lambda score, b, h, q, k: torch.log1p(score * 1e-3) * 1e3 + score.square().log1p(),
        "error function": lambda score, b, h, q, k: score * 0.5 * (1 + torch.erf(score * 0.7071)) + torch.erf(q - k),
        "small integers": lambda score, b, h, q, k: score + shorts[h],
        "activations": lambda score, b, h, q, k: (
            F.silu(score) + F.gelu(score) - F.gelu(score, approximate="tanh") + torch.tan(score * 0.1)
        ),
        "rows of a table": lambda score, b, h, q, k: (
            score * torch.exp(-(places[q] - places[k]).pow(2).sum(-1).sqrt()) + (places[k] * places[q]).mean(dim=-1)
            + torch.maximum(places[q], places[k]).amax(-1) + places[q][1] - (places[k] > 0.1).sum()
        ),
    }  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(functions("cpu")))
def test_scores(device, name):
    torch.manual_seed(1)
    function = functions(device)[name]
    q, k, v = three(device=device, dtype=torch.float16 if device == "cuda" else torch.float32)
    out, lse = flashcore_attn.flex_attention(q, k, v, function, return_lse=True)
    theirs, their_lse = TORCH_FLEX(q.float(), k.float(), v.float(), function, return_lse=True)
    atol = 4e-3 if device == "cuda" else 2e-5
    torch.testing.assert_close(out.float(), theirs, atol=atol, rtol=1e-4)
    torch.testing.assert_close(lse, their_lse, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_masks(device):
    q, k, v = three(device=device, dtype=torch.float16 if device == "cuda" else torch.float32)
    lengths = torch.tensor([17, 60], device=device)
    window = lambda b, h, q, k: q - k < 9  # noqa: E731
    padding = lambda b, h, q, k: k < lengths[b]  # noqa: E731
    masks = [
        causal, window, padding, flex.and_masks(causal, window, padding), flex.or_masks(causal, padding),
        flex.and_masks(flex.noop_mask, causal),
    ]  # fmt: skip
    for i, mask in enumerate(masks):
        block_mask = flex.create_block_mask(mask, 2, None, 50, 70, device=device)
        theirs = TORCH_FLEX(q.float(), k.float(), v.float(), block_mask=block_mask)
        for given in (block_mask, mask):
            ours = flashcore_attn.flex_attention(q, k, v, tanh_cap if i == 0 else None, given)
            if i == 0:
                theirs = TORCH_FLEX(q.float(), k.float(), v.float(), tanh_cap, block_mask)
            torch.testing.assert_close(ours.float(), theirs, atol=4e-3 if device == "cuda" else 1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_mask_without_a_function_is_taken_by_its_blocks(device):
    q, k, v = three(rows=256, keys=384, device=device, dtype=torch.float16)
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32, device=device)
    blocks = torch.tensor([[[[1, 0, 0], [2, 0, 0]]]], dtype=torch.int32, device=device)
    mask = flex.BlockMask.from_kv_blocks(counts, blocks, seq_lengths=(256, 384))
    dense = torch.zeros(256, 384, dtype=torch.bool, device=device)
    dense[:128, 128:256] = dense[128:, 256:] = dense[128:, :128] = True
    ours = flashcore_attn.flex_attention(q, k, v, block_mask=mask)
    theirs = TORCH_SDPA(q.double(), k.double(), v.double(), attn_mask=dense)
    torch.testing.assert_close(ours.double(), theirs, atol=3e-3, rtol=0)
    with pytest.raises(
        ValueError, match=r"invalid value '\(256, 384\)' for the lengths of block_mask: expected one for"
    ):
        flashcore_attn.flex_attention(torch.cat([q, q], 2), k, v, block_mask=mask)


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_heads_and_scale(device):
    q, k, v = three(heads=8, heads_k=2, device=device, dtype=torch.float16 if device == "cuda" else torch.float32)
    out = flashcore_attn.flex_attention(q, k, v, tanh_cap, causal, 0.3, True)
    wide = [x.repeat_interleave(4, 1).float() for x in (k, v)]
    block_mask = flex.create_block_mask(causal, 2, None, 50, 70, device=device)
    theirs = TORCH_FLEX(q.float(), *wide, tanh_cap, block_mask, 0.3)
    torch.testing.assert_close(out.float(), theirs, atol=4e-3 if device == "cuda" else 1e-5, rtol=1e-4)


def test_the_result_has_the_order_of_the_querys_dimensions():
    query = three(rows=1, heads=2, batch=6)[0].permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    _, key, value = three(heads_k=2, batch=1)
    out = flashcore_attn.flex_attention(query, key, value)
    assert query.stride() == (32, 192, 192, 1) == out.stride()


def test_contents_of_captured_tensors_are_read_at_each_call():
    q, k, v = three()
    bias = torch.zeros(4)
    function = lambda score, b, h, q, k: score * (1 + bias[h])  # noqa: E731
    first = flashcore_attn.flex_attention(q, k, v, function)
    bias.fill_(2.0)
    second = flashcore_attn.flex_attention(q, k, v, function)
    assert torch.equal(second, flashcore_attn.flex_attention(q, k, v, lambda s, b, h, q, k: s * 3.0))
    assert not torch.equal(first, second)
    # A number that was read from a tensor while tracing belongs to that trace only.
    read = lambda score, b, h, q, k: score * bias[0].item()  # noqa: E731
    before = flashcore_attn.flex_attention(q, k, v, read)
    bias.fill_(5.0)
    assert not torch.equal(flashcore_attn.flex_attention(q, k, v, read), before)


class Settings:
    window = 2


class Window(int):
    __repr__ = lambda self: "Window"  # noqa: E731


def _settings():
    return Settings.window


def test_a_function_is_traced_again_when_what_it_reads_has_changed():
    q, k, v = three()
    numbers, wrapped = np.array([2]), np.array([2])
    table, get, setting = flashcore_attn.table(wrapped), {"window": 2}, [Window(2)]
    _settings.window = 2

    def change():
        Settings.window = _settings.window = numbers[0] = wrapped[0] = get["window"] = 16
        setting[0] = Window(16)

    bound = get.get
    masks = [
        lambda b, h, i, j: i - j < Settings.window,
        lambda b, h, i, j: i - j < numbers[0],
        lambda b, h, i, j: i - j < int(numbers[0]),
        lambda b, h, i, j: i - j < table[0],
        lambda b, h, i, j: i - j < bound("window"),
        lambda b, h, i, j: i - j < _settings.window,
        lambda b, h, i, j: i - j < _settings(),
        lambda b, h, i, j: i - j < setting[0],
    ]
    run = lambda mask: flashcore_attn.flex_attention(q, k, v, None, mask)  # noqa: E731
    narrow, wide = (run(lambda b, h, i, j, most=most: i - j < most) for most in (2, 16))
    for mask in masks:
        assert torch.equal(run(mask), narrow)
    change()
    for number, mask in enumerate(masks):
        assert torch.equal(run(mask), wide), number


@pytest.mark.parametrize("device", DEVICES)
def test_compat_serves_masks_and_functions(device):
    flashcore_attn.compat.reset_stats()
    q, k, v = three(device=device, dtype=torch.float16 if device == "cuda" else torch.float32)
    shown = torch.rand(2, 1, 50, 70, device=device) > 0.4
    bias = torch.randn(4, 50, 70, device=device, dtype=q.dtype)
    block_mask = flex.create_block_mask(causal, None, None, 50, 70, device=device)
    with flashcore_attn.compat.enabled(), torch.no_grad():
        atol = 4e-3 if device == "cuda" else 1e-5
        for mask in (shown, bias, bias.float()):
            ours = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            wanted = mask if mask.dtype == torch.bool else mask.float()
            torch.testing.assert_close(
                ours.float(), TORCH_SDPA(q.float(), k.float(), v.float(), wanted), atol=atol, rtol=1e-3
            )
        ours = flex.flex_attention(q, k, v, tanh_cap, block_mask)
        theirs = TORCH_FLEX(q.float(), k.float(), v.float(), tanh_cap, block_mask)
        torch.testing.assert_close(ours.float(), theirs, atol=atol, rtol=1e-3)
    assert flashcore_attn.compat.stats() == {"calls": 4, "flashcore": 4, "fallback": 0, "reasons": {}}
    assert flex.flex_attention is TORCH_FLEX
    with flashcore_attn.compat.enabled():
        theirs = flex.flex_attention(q, k, v, lambda s, b, h, q, k: s + torch.asin(s))
    assert flashcore_attn.compat.stats()["reasons"] == {"program": 1} and theirs.shape == q.shape
    flashcore_attn.compat.reset_stats()


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_calls_with_features(device):
    q, k, v = three(device=device, dtype=torch.float16)
    shown = torch.rand(2, 1, 50, 70, device=device) > 0.4
    slopes, sink = torch.rand(4, device=device), torch.rand(4, device=device)
    starts = torch.tensor([0, 13, 50], dtype=torch.int32, device=device)

    def layer(q, k, v, shown, slopes, sink, starts):
        masked = flashcore_attn.scaled_dot_product_attention(q * 1.0, k, v, attn_mask=shown)
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        whole, lse, _ = flashcore_attn.flash_attn_varlen_func(
            rows[0], rows[1][:50], rows[2][:50], starts, starts, 37, 37, causal=True, alibi_slopes=slopes,
            learnable_sink=sink, return_attn_probs=True,
        )  # fmt: skip
        return masked, whole, lse

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for ours, theirs in zip(
            compiled(q, k, v, shown, slopes, sink, starts), layer(q, k, v, shown, slopes, sink, starts)
        ):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_with_features_passes_pytorchs_own_checks(device):
    q, k, v = three(device=device, dtype=torch.float16)
    used = torch.tensor([3, 70], dtype=torch.int32, device=device)
    sink, table = torch.rand(4, device=device), torch.rand(70, device=device)
    terms = (False, -1, 0, None, 0.0)
    features = (
        None,
        None,
        None,
        used,
        None,
        2,
        50,
        70,
        sink,
        "s + t0[k]",
        "(q + i0) % 3 != 0",
        [],
        [4],
        [table],
        None,
        None,
        None,
        [0, 0, 0],
    )
    for want_lse in (False, True):
        torch.library.opcheck(
            torch.ops.flashcore_attn.attention_with, (q, k, v, 1, *terms, want_lse, *features),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
        )  # fmt: skip


def test_devices_of_captured_tensors_are_compared():
    q, k, v = three()
    elsewhere = torch.zeros(4, device="meta")
    with pytest.raises(flashcore_attn.ArgumentError, match="a captured tensor is on meta, q on cpu; they must be"):
        flashcore_attn.flex_attention(q, k, v, lambda s, b, h, q, k: s + elsewhere[h])
    with pytest.raises(flashcore_attn.ArgumentError, match="attn_mask is on meta, q on cpu"):
        flashcore_attn.scaled_dot_product_attention(q, k, v, torch.zeros(50, 70, device="meta"))
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    with pytest.raises(flashcore_attn.ArgumentError, match="alibi_slopes is on meta, q on cpu"):
        flashcore_attn.flash_attn_func(*rows, alibi_slopes=elsewhere)


def test_the_number_of_captured_tensors_is_bounded():
    q, k, v = three()
    score = lambda s, b, h, q, k: s + sum(x[h] for x in tables)  # noqa: E731
    tables = [torch.zeros(4) for _ in range(8)]
    flashcore_attn.flex_attention(q, k, v, score)
    tables.append(torch.zeros(4))
    with pytest.raises(
        flashcore_attn.ArgumentError, match="'9' for the number of captured tensors: expected at most 8"
    ):
        flashcore_attn.flex_attention(q, k, v, score)


def test_a_captured_number_is_one_table_however_often_it_is_read():
    q, k, v = three()
    numbers = [torch.tensor(0.25 * (i + 1), requires_grad=True) for i in range(8)]

    def score(s, b, h, i, j):
        for number in numbers:
            s = number * s + number
        return s

    out = flashcore_attn.flex_attention(q, k, v, score)
    torch.testing.assert_close(out, TORCH_FLEX(q, k, v, score).detach(), atol=2e-5, rtol=2e-5)
    assert all(x is not None for x in torch.autograd.grad(out.sum(), numbers))


def test_a_captured_tensor_beyond_its_storage_is_refused():
    q, k, v = three()
    released = torch.zeros(4)
    released.untyped_storage().resize_(0)
    with pytest.raises(flashcore_attn.ArgumentError, match="a captured tensor ends at byte 16 of its storage"):
        flashcore_attn.flex_attention(q, k, v, lambda s, b, h, q, k: s + released[h])


def test_pytorchs_mask_of_a_call_without_one_is_none():
    q, k, v = three()
    out = flashcore_attn.flex_attention(q, k, v, tanh_cap, flex._create_empty_block_mask(q, k))
    assert torch.equal(out, flashcore_attn.flex_attention(q, k, v, tanh_cap))


def test_calls_that_cannot_be_recorded_are_refused():
    q, k, v = three()
    for function in (
        lambda s, b, h, i, j: F.relu(s, inplace=True),
        lambda s, b, h, i, j: torch.abs_(s),
        lambda s, b, h, i, j: torch.max(s, dim=0),
        lambda s, b, h, i, j: s.sub(),
        lambda s, b, h, i, j: s.view(torch.int32),
    ):
        with pytest.raises(flashcore_attn.UnsupportedError, match="cannot be part of a program") as error:
            flashcore_attn.flex_attention(q, k, v, function)
        assert error.value.reason == "program" and "test_flex.py:" in str(error.value)
    for result, options in (
        ("score", {"score_mod": lambda *_: None}),
        ("truth value", {"block_mask": lambda *_: None}),
    ):
        with pytest.raises(flashcore_attn.ArgumentError, match=f"the function returned None; expected a {result}"):
            flashcore_attn.flex_attention(q, k, v, **options)


@pytest.mark.parametrize("name", ["rows of a table", "waves", "rounding", "activations", "relative", "nested index"])
def test_gradients_of_score_functions(name, monkeypatch):
    torch.manual_seed(1)
    function = functions("cpu")[name]
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # PyTorch's eager function can, on the CPU
    q, k, v = (x.requires_grad_() for x in three())
    weights = torch.randn(2, 4, 50, 32)
    ours = torch.autograd.grad(flashcore_attn.flex_attention(q, k, v, function), (q, k, v), weights)
    theirs = torch.autograd.grad(TORCH_FLEX(q, k, v, function), (q, k, v), weights)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, atol=5e-5, rtol=1e-3)


def test_long_rows_of_a_table_are_refused():
    q, k, v = three()
    long, pages = torch.zeros(70, 17), torch.zeros(70, 2, 2)
    for function, words in (
        (lambda s, b, h, q, k: s + long[q].sum(-1), r"a row of shape \(17,\) of an array"),
        (lambda s, b, h, q, k: s + pages[q].sum(-1), r"a row of shape \(2, 2\) of an array"),
        (lambda s, b, h, q, k: s + long[q, :2], "a look-up with a slice beside a position"),
        (lambda s, b, h, q, k: s + pages[q, 0], "a row of an array as a number"),
        (lambda s, b, h, q, k: s + pages[q, 0].sum(1), "the function sum with these arguments"),
    ):
        with pytest.raises(flashcore_attn.UnsupportedError, match=words):
            flashcore_attn.flex_attention(q, k, v, function)


def test_a_python_number_of_a_position_is_refused():
    q, k, v = three()
    with pytest.raises(
        flashcore_attn.UnsupportedError, match=r"test_flex.py:\d+: a Python number of a score or a position"
    ):
        flashcore_attn.flex_attention(q, k, v, lambda s, b, h, q, k: s + math.floor(float(q)))


def _lists(kinds):
    """Counts and indices of the blocks of each kind, 1 for partial and 2 for full, as FlashAttention-4 has them."""
    found = []
    for kind in (1, 2):
        matches = kinds == kind
        found += [matches.sum(-1).to(torch.int32), matches.int().argsort(dim=-1, descending=True, stable=True)]
    return flashcore_attn.BlockSparseTensors(found[0], found[1].int(), found[2], found[3].int(), block_size=(16, 32))


def test_block_sparse_tensors_say_what_is_seen():
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 2, rows, 16) for rows in (60, 100, 100))
    kinds = torch.randint(3, (1, 2, 4, 4))  # 0 hidden, 1 in part, 2 full
    mask = flashcore_attn.block_sparse_mask(lambda b, h, q, k: (q + k) % 3 == 0, _lists(kinds))
    out = flashcore_attn.flex_attention(q, k, v, None, mask)
    i, j = torch.arange(60)[:, None], torch.arange(100)
    of_pair = kinds[:, :, i // 16, j // 32]
    seen = (of_pair == 2) | (of_pair == 1) & ((i + j) % 3 == 0)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen.expand(2, 2, 60, 100))
    torch.testing.assert_close(out, expected.nan_to_num(0.0), atol=2e-5, rtol=1e-4)


def test_block_sparse_tensors_alone_and_hostile_ones():
    q = k = v = torch.randn(1, 1, 32, 16)
    counts, indices = (
        torch.tensor([[[2, 9]]], dtype=torch.int32),
        torch.tensor([[[[0, 1], [7, -1]]]], dtype=torch.int32),
    )
    lists = flashcore_attn.BlockSparseTensors(counts, indices)
    out = flashcore_attn.flex_attention(q, k, v, None, flashcore_attn.block_sparse_mask(None, lists, (16, 16)))
    expected = flashcore_attn.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out[:, :, :16], expected[:, :, :16])
    assert not out[:, :, 16:].any(), "indices outside the blocks show nothing"


@pytest.mark.parametrize(
    ("lists", "size", "message"),
    [
        ((None, None), (16, 16), "mask_block_cnt: expected a tensor where full_block_cnt is None"),
        ((torch.ones(1, 1, 2), torch.ones(1, 1, 2, 2)), None, "block_size"),
        ((torch.ones(1, 1, 2), torch.ones(1, 1, 2, 2)), (0, 16), "block_size"),
        ((torch.ones(1, 2), torch.ones(1, 1, 2, 2)), (16, 16), "the shapes of mask_block_cnt and mask_block_idx"),
        ((None, torch.ones(1, 1, 2, 2)), (16, 16), "belong together"),
        ((torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int()), (16, 16), "row blocks"),
        ((torch.ones(3, 1, 2).int(), torch.zeros(3, 1, 2, 1).int()), (16, 16), "batch of block_mask"),
    ],
)
def test_block_lists_of_other_shapes_are_refused(lists, size, message):
    q = torch.randn(1, 1, 32, 16)
    with pytest.raises(flashcore_attn.ArgumentError, match=message):
        mask = flashcore_attn.block_sparse_mask(None, flashcore_attn.BlockSparseTensors(*lists), size)
        flashcore_attn.flex_attention(q, q, q, None, mask)


@pytest.mark.skipif(not hasattr(flex, "AuxRequest"), reason="PyTorch is older than AuxRequest")
def test_auxiliary_outputs_and_options_of_kernels():
    q, k, v = three()
    expected, expected_lse = flashcore_attn.flex_attention(q, k, v, tanh_cap, return_lse=True)
    flashcore_attn.compat.reset_stats()
    with flashcore_attn.compat.enabled():
        for attend in (flashcore_attn.flex_attention, flex.flex_attention):
            options = {"kernel_options": {"BLOCK_M": 32}}
            out, aux = attend(q, k, v, tanh_cap, return_aux=flex.AuxRequest(lse=True), **options)
            assert torch.equal(out, expected) and torch.equal(aux.lse, expected_lse) and aux.max_scores is None
            assert attend(q, k, v, tanh_cap, return_aux=flex.AuxRequest())[1] == flex.AuxOutput()
        with pytest.raises(NotImplementedError, match="max scores is not supported on CPU"):  # PyTorch's own error
            flex.flex_attention(q, k, v, tanh_cap, return_aux=flex.AuxRequest(max_scores=True))
    assert flashcore_attn.compat.stats()["reasons"] == {"return_aux": 1}
    with pytest.raises(flashcore_attn.UnsupportedError, match="for return_aux: expected no max_scores"):
        flashcore_attn.flex_attention(q, k, v, return_aux=flex.AuxRequest(max_scores=True))
    with pytest.raises(flashcore_attn.ArgumentError, match="for return_lse: expected False where return_aux"):
        flashcore_attn.flex_attention(q, k, v, return_lse=True, return_aux=flex.AuxRequest())


def test_vmap_of_calls_with_features():
    q, k, v = (torch.randn(3, 2, 4, 8, 16) for _ in range(3))
    masks, sinks, bias = torch.rand(8, 3, 8) > 0.3, torch.randn(3, 4), torch.randn(3, 4)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)

    def masked(q, k, v, mask, sink, bias):
        shown = flashcore_attn.scaled_dot_product_attention(q, k, v, mask)
        scored = flashcore_attn.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h] * j)
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        packed, lse, _ = flashcore_attn.flash_attn_varlen_func(
            *rows, starts, starts, learnable_sink=sink, return_attn_probs=True
        )
        return shown, scored, packed, lse

    mapped = torch.vmap(masked, in_dims=(0, 0, None, 1, 0, 0))(q, k, v[0], masks, sinks, bias)
    for i in range(3):
        for ours, alone in zip(mapped, masked(q[i], k[i], v[0], masks[:, i], sinks[i], bias[i])):
            assert torch.equal(ours[i], alone)
    with flashcore_attn.compat.enabled(), torch.no_grad():
        attend = lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask)  # noqa: E731
        ours = torch.vmap(attend, in_dims=(0, 1))(q, masks)
    torch.testing.assert_close(ours, torch.stack([TORCH_SDPA(x, x, x, m) for x, m in zip(q, masks.unbind(1))]))


NARROW = {
    "difference": lambda x, y: x - y,
    "sum": lambda x, y: x + y + 100,
    "product": lambda x, y: x * y * 3,
    "remainder": lambda x, y: x % -3,
    "quotient": lambda x, y: y // -3 + x // 2,
    "power": lambda x, y: x**3,
    "signs": lambda x, y: -x + abs(-y) + torch.sign(x - y),
    "bits": lambda x, y: (~x & y) ^ (x | -2),
    "shifts": lambda x, y: (x << 3) + (y >> 1),
    "choice": lambda x, y: torch.where(x > y, x, y) - torch.minimum(x, y) * 2,
    "wider": lambda x, y: x.int() * y.int() - x.long(),
    "narrower": lambda x, y: (x.int() * 5).to(torch.uint8) + (y.int() * 5).to(torch.int8),
    "types": lambda x, y: x * y.to(torch.int8) + y.short() * x.byte(),
    "mixed": lambda x, y: (x > y) * x - 1,
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
@pytest.mark.parametrize("name", NARROW)
def test_integers_wrap_around_as_in_pytorch(name, dtype):
    bounds = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(1)
    of_query, of_key = (
        torch.randint(bounds.min, bounds.max + 1, (n,), generator=generator).to(dtype) for n in (50, 70)
    )
    of_query[0], of_key[0], of_key[1] = bounds.min, bounds.max, bounds.min
    q, k, v = three()

    def score(s, b, h, i, j):
        return s + NARROW[name](of_query[i], of_key[j]) * 1e-3

    theirs = TORCH_FLEX(q, k, v, score)
    torch.testing.assert_close(flashcore_attn.flex_attention(q, k, v, score), theirs, atol=2e-5, rtol=1e-4)
