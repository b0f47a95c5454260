"""Models of Hugging Face ``transformers`` with random weights: FlashCore's attention against eager attention."""

from __future__ import annotations

import inspect
import types
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.t5 import modeling_t5  # noqa: E402

import flashcore_attn  # noqa: E402
import flashcore_attn.integrations.transformers as integration  # noqa: E402

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SMALL, "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 128}
LAYERS = ["sliding_attention", "full_attention"]


def built(model, config, **settings):
    torch.manual_seed(0)
    made = model._from_config(config(**settings), attn_implementation="eager", dtype=torch.float32)
    for name, parameter in made.named_parameters():
        if "norm" not in name.lower():
            torch.nn.init.normal_(parameter, std=0.2)
    return made.eval()


def tokens(batch=3, length=23):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 100, (batch, length), generator=generator)


def compare(model, monkeypatch, calls, keep=None, **inputs):
    """Both implementations on the same inputs. Nothing may reach PyTorch's attention."""

    def outputs():
        with torch.no_grad():
            result = model(**inputs)
        return result.logits if "logits" in result else result[0]

    expected = outputs()
    counted = []

    def count(*args, **kwargs):
        counted.append(1)
        return integration.attention(*args, **kwargs)

    def refuse(*args, **kwargs):
        raise AssertionError("attention fell back to PyTorch")

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
        transformers.AttentionInterface.register(integration.NAME, count)
        try:
            model.set_attn_implementation(integration.NAME)
            ours = outputs()
        finally:
            integration.register()
    assert len(counted) == calls, counted
    if keep is not None:
        expected, ours = expected[keep], ours[keep]
    assert expected.std() > 0.01 and torch.isfinite(ours).all()
    # Sums of f32 in another order; logits grow with the size of the hidden states.
    worst = (ours - expected).abs().max() / expected.abs().max()
    assert worst < 2e-5, worst


def padded(length=23):
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, :9] = 0  # on the left, as for generation
    mask[2, :1] = 0
    return mask


def test_llama_with_a_padded_batch(monkeypatch):
    model = built(transformers.LlamaForCausalLM, transformers.LlamaConfig, **DECODER)
    mask = padded()
    compare(model, monkeypatch, 2, keep=mask.bool(), input_ids=tokens(), attention_mask=mask)
    compare(
        built(transformers.LlamaForCausalLM, transformers.LlamaConfig, **DECODER), monkeypatch, 2, input_ids=tokens()
    )


def test_mistral_with_a_window(monkeypatch):
    settings = {**DECODER, "sliding_window": 7}
    model = built(transformers.MistralForCausalLM, transformers.MistralConfig, **settings)
    compare(model, monkeypatch, 2, keep=padded().bool(), input_ids=tokens(), attention_mask=padded())


def test_gemma_2(monkeypatch):
    settings = {**DECODER, "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0, "layer_types": LAYERS}
    model = built(transformers.Gemma2ForCausalLM, transformers.Gemma2Config, **settings)
    compare(model, monkeypatch, 2, input_ids=tokens())


def test_gemma_3(monkeypatch):
    settings = {**DECODER, "head_dim": 16, "sliding_window": 8, "layer_types": LAYERS}
    model = built(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, **settings)
    compare(model, monkeypatch, 2, input_ids=tokens())


def test_gpt_oss_with_sinks(monkeypatch):
    settings = {
        **DECODER, "head_dim": 16, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
        "layer_types": LAYERS,
    }  # fmt: skip
    model = built(transformers.GptOssForCausalLM, transformers.GptOssConfig, **settings)
    assert any("sinks" in name for name, _ in model.named_parameters())
    compare(model, monkeypatch, 2, input_ids=tokens())


def test_llama_4_with_chunks(monkeypatch):
    settings = {
        **DECODER, "head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = built(transformers.Llama4ForCausalLM, transformers.Llama4TextConfig, **settings)
    assert "chunked_attention" in model.config.layer_types
    compare(model, monkeypatch, 2, input_ids=tokens())


@pytest.mark.skipif(
    not hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS"), reason="this version's T5 calls no attention interface"
)
def test_t5_with_its_bias(monkeypatch):
    model = built(
        transformers.T5ForConditionalGeneration, transformers.T5Config, vocab_size=101, d_model=64, d_kv=16, d_ff=96,
        num_layers=2, num_decoder_layers=2, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    mask = torch.ones(3, 23, dtype=torch.long)
    mask[1, 15:] = 0
    compare(model, monkeypatch, 6, input_ids=tokens(), attention_mask=mask, decoder_input_ids=tokens(3, 11))


def test_bert(monkeypatch):
    model = built(
        transformers.BertForMaskedLM, transformers.BertConfig, **SMALL, vocab_size=101, max_position_embeddings=64
    )  # fmt: skip
    mask = torch.ones(3, 23, dtype=torch.long)
    mask[1, 15:] = 0
    compare(model, monkeypatch, 2, input_ids=tokens(), attention_mask=mask)


def test_vit(monkeypatch):
    model = built(transformers.ViTForImageClassification, transformers.ViTConfig, **SMALL, image_size=32, patch_size=8)
    compare(model, monkeypatch, 2, pixel_values=torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)))


def test_whisper(monkeypatch):
    model = built(
        transformers.WhisperForConditionalGeneration, transformers.WhisperConfig, vocab_size=101, num_mel_bins=16,
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=30, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    features = torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(3))
    compare(model, monkeypatch, 6, input_features=features, decoder_input_ids=tokens(2, 9))


def test_the_vision_tower_of_qwen_2_5_vl(monkeypatch):
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    model = built(
        Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLVisionConfig, depth=2, hidden_size=64, num_heads=4,
        intermediate_size=96, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, window_size=16,
        out_hidden_size=64, fullatt_block_indexes=[1],
    )  # fmt: skip
    grid = torch.tensor([[1, 8, 12], [1, 4, 4]])
    patches = torch.randn(8 * 12 + 16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(4))
    compare(model, monkeypatch, 2, hidden_states=patches, grid_thw=grid)


def test_lengths_beside_a_mask_are_not_applied_twice(monkeypatch):
    # What a collator of packed sequences passes. The positions alone make a mask.
    model = built(transformers.LlamaForCausalLM, transformers.LlamaConfig, **DECODER)
    starts = torch.tensor([0, 9, 23], dtype=torch.int32)
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    named = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 14, "max_length_k": 14}
    compare(model, monkeypatch, 2, input_ids=tokens(1), position_ids=positions, use_cache=False, **named)


def test_what_packed_and_paged_calls_cannot_say_is_refused():
    q = torch.randn(1, 2, 6, 16)
    starts, module = torch.tensor([0, 2, 6], dtype=torch.int32), torch.nn.Identity()
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    for named in (
        {"cache": object()},
        {"cache": types.SimpleNamespace(update=None)},
        {"block_table": starts},
        {**lengths, "cu_seq_lens_k": {"full_attention": starts}},
        {**lengths, "position_bias": torch.zeros(1, 2, 6, 6)},
    ):
        with pytest.raises(flashcore_attn.UnsupportedError):
            integration.attention(module, q, q, q, None, **named)
    for shape in ((1, 1, 6, 5), (1, 1, 5, 6), (1, 1, 1, 6, 6), (3, 1, 6, 6)):
        with pytest.raises(flashcore_attn.ArgumentError, match="the shape of attention_mask"):
            integration.attention(module, q, q, q, torch.ones(shape, dtype=torch.bool))


def test_generation_reads_a_cache(monkeypatch):
    model = built(transformers.LlamaForCausalLM, transformers.LlamaConfig, **DECODER)
    options = {"attention_mask": padded(), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens(), **options)
    model.set_attn_implementation(integration.NAME)
    assert torch.equal(model.generate(tokens(), **options), expected)


def prompts(lengths=(5, 23, 1, 9)):
    return [tokens(1, length)[0].tolist() for length in lengths]


def batched(model, implementation, monkeypatch, **settings):
    """The tokens of each prompt by continuous batching, and the calls of each kind."""
    calls = {"read": 0, "append": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    config = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=64, max_batch_tokens=16, max_memory_percent=0.05, auto_switch_to_flash=False,
        **settings,
    )  # fmt: skip
    options = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.set_attn_implementation(implementation)
    with monkeypatch.context() as patch:
        patch.setattr(integration, "flash_attn_varlen_func", counted("read", integration.flash_attn_varlen_func))
        patch.setattr(integration, "flash_attn_with_kvcache", counted("append", integration.flash_attn_with_kvcache))
        made = model.generate_batch(
            inputs=prompts(), generation_config=options, continuous_batching_config=config, progress_bar=False
        )
    assert all(each.error is None for each in made.values()), made
    return [made[key].generated_tokens for key in sorted(made)], calls


#: Models whose layers have kinds of caches that differ, and what else their attention has.
SERVED = {
    "Llama": {},
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"sliding_window": 8, "layer_types": LAYERS, "attn_logit_softcapping": 5.0},
    "Gemma3": {"sliding_window": 8, "layer_types": LAYERS},
    "GptOss": {"sliding_window": 8, "layer_types": LAYERS, "num_local_experts": 2, "num_experts_per_tok": 2},
}


def served(name):
    """The model, and the tokens that ``generate`` gives each prompt by eager attention."""
    kind, config = (getattr(transformers, f"{name}{end}", None) for end in ("ForCausalLM", "Config"))
    config = getattr(transformers, f"{name}TextConfig", config)
    model = built(kind, config, **DECODER, **({"head_dim": 16} if len(SERVED[name]) > 1 else {}), **SERVED[name])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    found = [model.generate(torch.tensor([each]), **options)[0, len(each) :].tolist() for each in prompts()]
    return model, found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
@pytest.mark.parametrize("name", SERVED)
def test_continuous_batching_has_the_tokens_of_eager_attention(monkeypatch, name, device):
    configured = getattr(transformers, "ContinuousBatchingConfig", None)
    if configured is None or "page_size" not in inspect.signature(configured).parameters:
        pytest.skip(f"transformers {transformers.__version__} has no ContinuousBatchingConfig with page_size")
    model, expected = served(name)
    model.to(device)
    theirs, calls = batched(model, "eager", monkeypatch)
    assert sorted(theirs) == sorted(expected) and not any(calls.values())
    model.set_attn_implementation("eager")
    for settings in ({"max_blocks_per_request": 0}, {"max_blocks_per_request": 8}):
        ours, calls = batched(model, integration.NAME, monkeypatch, **settings)
        assert ours == theirs
        # Layers with a window have no block tables in transformers.
        decodes = not SERVED[name] and settings["max_blocks_per_request"] > 0
        assert calls["read"] > 0 and (calls["append"] > 0) == decodes, calls


def test_what_is_not_computed_is_left_to_sdpa():
    model = built(transformers.LlamaForCausalLM, transformers.LlamaConfig, **DECODER)
    model.set_attn_implementation(integration.NAME)
    with torch.no_grad(), pytest.warns(UserWarning, match="dtype torch.float64") as caught:
        model.double().eval()(input_ids=tokens())
    assert len(caught) == 1  # of two layers
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=tokens())


def test_dropout_is_that_of_training():
    model = built(transformers.LlamaForCausalLM, transformers.LlamaConfig, **DECODER, attention_dropout=0.5)
    model.set_attn_implementation(integration.NAME)
    plain = model(input_ids=tokens()).logits
    torch.manual_seed(1)
    first, second = (model.train()(input_ids=tokens()).logits for _ in range(2))
    torch.manual_seed(1)
    again = model(input_ids=tokens()).logits
    again.sum().backward()
    assert torch.equal(first, again) and not torch.equal(first, second) and not torch.equal(first, plain)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["Bloom", "Falcon", "Mpt"])
def test_models_that_compute_attention_themselves_are_refused(name):
    config = getattr(transformers, f"{name}Config")()
    config.num_hidden_layers = config.n_layer = config.n_layers = 1
    model = getattr(transformers, f"{name}Model")
    with pytest.raises(flashcore_attn.UnsupportedError, match=f"{name}Model computes attention itself"):
        model._from_config(config, attn_implementation=integration.NAME)


def test_what_sdpa_computes_otherwise_is_refused():
    settings = {**DECODER, "head_dim": 16, "attn_logit_softcapping": 5.0, "layer_types": LAYERS}
    model = built(transformers.Gemma2ForCausalLM, transformers.Gemma2Config, **settings)
    model.set_attn_implementation(integration.NAME)
    with pytest.raises(flashcore_attn.UnsupportedError, match="eager"), torch.no_grad():
        model.double()(input_ids=tokens())


@pytest.mark.parametrize(("name", "more"), [("Gemma2", {}), ("GptOss", {"num_local_experts": 4})])
def test_compat_names_models_that_are_eager_by_default(name, more):
    """And the line that it names switches them."""
    settings = {**DECODER, "head_dim": 16, "layer_types": LAYERS, **more}
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    flashcore_attn.compat.reset_stats()
    with torch.no_grad(), flashcore_attn.compat.enabled():
        model(input_ids=tokens())
        first, *others = flashcore_attn.compat.stats()["why"]
        assert f"attention of {name}ForCausalLM, {name}Model is 'eager'" in first, first
        assert not any("flex_attention" in other for other in others), others
        line = 'model.set_attn_implementation("flashcore")'
        assert line in first
        eager = model(input_ids=tokens()).logits
        exec(line, {"model": model})
        torch.testing.assert_close(model(input_ids=tokens()).logits, eager, atol=1e-4, rtol=1e-4)
        first, *_ = flashcore_attn.compat.stats()["why"]
        assert f"attention of {name}ForCausalLM, {name}Model is 'flashcore', which calls FlashCore" in first, first


def test_sinks_have_gradients():
    q = torch.randn(1, 2, 5, 16)
    for dtype in (torch.float32, torch.bfloat16):
        sinks = torch.zeros(2, dtype=dtype, requires_grad=True)
        out, _ = integration.attention(torch.nn.Identity(), q, q, q, None, s_aux=sinks)
        out.sum().backward()
        assert sinks.grad.dtype == dtype and sinks.grad.abs().max() > 0
