"""Models of Hugging Face ``transformers`` are fine-tuned, against eager attention."""

from __future__ import annotations

import contextlib
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_transformers import DECODER, LAYERS, SMALL, built, tokens  # noqa: E402

import flashcore_attn.integrations.transformers as integration  # noqa: E402
from flashcore_attn import compat  # noqa: E402

STEPS = 20
WINDOWS = {**DECODER, "head_dim": 16, "sliding_window": 8, "layer_types": LAYERS}
# Every token goes to every expert: with a choice of experts, a rounding could choose another one.
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
MODELS = {
    "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, DECODER),
    "Gemma 3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, WINDOWS),
    "GPT-OSS": (transformers.GptOssForCausalLM, transformers.GptOssConfig, {**WINDOWS, **EXPERTS}),
    "ViT": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig,
        {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 7},
    ),
}
# What a loss may be off beside twice the error of eager attention in the same type.
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def batches(name):
    """Equal batches in every run: the model overfits three rows, of which one is padded on the right."""
    if name == "ViT":
        pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
        return {"pixel_values": pixels, "labels": torch.tensor([1, 0, 6, 3])}
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, 16:] = 0  # the window of the last row has a visible key
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def losses(name, implementation, dtype):
    """The loss of each step of AdamW. With ``torch.bfloat16``, the weights are float32 under autocast."""
    kind, config, settings = MODELS[name]
    model = built(kind, config, **settings)
    model.set_attn_implementation(implementation)
    if name == "GPT-OSS":
        model.set_experts_implementation("eager")  # the others have no float64
    inputs = batches(name)
    if dtype == torch.float64:
        model.double()
        inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    autocast = torch.autocast("cpu", dtype) if dtype == torch.bfloat16 else contextlib.nullcontext()
    found = []
    for _ in range(STEPS):
        with autocast:
            loss = model.train()(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These models are too small for threads, which wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def truth(one_thread):
    """The losses in float64, by model. Eager attention has a softmax in float32, except for that of GPT-OSS."""
    return {name: losses(name, "eager" if name == "GPT-OSS" else "sdpa", torch.float64) for name in MODELS}


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_are_fine_tuned_with_the_losses_of_eager_attention(monkeypatch, truth, name, dtype):
    right, eager = truth[name], losses(name, "eager", dtype)
    assert right[-1] < 0.8 * right[0]
    calls = []
    compute = integration.attention
    counted = lambda *args, **named: (calls.append(1), compute(*args, **named))[1]  # noqa: E731
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, integration.NAME, counted)
    # transformers has no SDPA for the sinks of GPT-OSS.
    for implementation in ("sdpa", integration.NAME) if name != "GPT-OSS" else (integration.NAME,):
        compat.reset_stats()
        with compat.enabled(), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # as the integration leaves a call to SDPA
            ours = losses(name, implementation, dtype)
        stats, expected = compat.stats(), STEPS * SMALL["num_hidden_layers"]
        assert stats["fallback"] == 0, stats
        assert (stats["flashcore"], len(calls)) == ((expected, 0) if implementation == "sdpa" else (0, expected))
        allowed = 2 * (eager - right).norm() + RELATIVE[dtype] * right.norm()
        error = (ours - right).norm()
        assert error <= allowed, f"{implementation}: {error} of {right.norm()}, allowed {allowed}"
