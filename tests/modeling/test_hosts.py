"""What single hosts do in a way of their own: masks and caches by other names, tied heads, parts left out, threads."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from support.generation import GREEDY, causal, generate_and_check, prompts
from support.tiny import TEXT, converted, inputs_of
from transformers import AutoModel, AutoModelForImageTextToText

import linearize
from linearize.attention.cache import cache_nbytes
from linearize.attention.interface import linear_attentions, observed
from linearize.conversion.attentions import trial_runs
from linearize.core.errors import CheckpointError, ConfigError

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 37}


def test_several_end_tokens_are_read_from_the_config():
    config = transformers.LlamaConfig(**TEXT, bos_token_id=1, eos_token_id=[2, 98], pad_token_id=0)
    model = transformers.LlamaForCausalLM(config)
    assert len(trial_runs(model)[1]) == TEXT["num_hidden_layers"]
    linearize.convert(model)


def test_a_mask_handed_over_by_name():
    torch.manual_seed(0)
    config = transformers.Blip2VisionConfig(**HEADS, image_size=28, patch_size=14)
    model = transformers.Blip2VisionModel(config).eval()
    pixels = {"pixel_values": torch.randn(1, 3, 28, 28)}
    assert [call.mask for call in trial_runs(model)[1]] == ["none", "none"]
    linearize.convert(model)
    assert torch.isfinite(model(**pixels).last_hidden_state).all()


@pytest.mark.parametrize("name", ["GPTNeoX", "GPTBigCode"])
def test_a_cache_under_another_name(name):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 37} if name == "GPTBigCode" else HEADS
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=99, eos_token_id=98, pad_token_id=0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    linearize.convert(model)
    model.eval()
    inputs = prompts()
    generate_and_check(model, inputs, **GREEDY)


def test_eight_threads_generate_what_one_does():
    model = causal("llama")
    starts = [torch.tensor([[3 + i, 5, 7]]) for i in range(8)]
    expected = [model.generate(start, **GREEDY).tolist() for start in starts]
    found: list[object] = [None] * 8

    def work(i: int) -> None:
        try:
            found[i] = [model.generate(starts[i], **GREEDY).tolist() for _ in range(3)]
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[one] * 3 for one in expected]


def test_a_model_without_its_pooler_comes_back(tmp_path):
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False).eval()
    linearize.convert(model)
    model.eval()
    linearize.save(model, tmp_path / "out")
    inputs = inputs_of(model)
    loaded = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    assert loaded.pooler is not None
    same = AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False).eval()
    assert same.pooler is None
    assert torch.equal(same(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    # Saved once more with the pooler, nothing is absent any longer.
    linearize.save(loaded, tmp_path / "again")
    assert "absent" not in AutoModel.from_pretrained(tmp_path / "again").config.linearize


def test_attention_weights_asked_for_at_the_load(tmp_path):
    model = converted("bert")
    linearize.save(model, tmp_path / "out")
    inputs = inputs_of(model)
    expected = model(**inputs, output_attentions=True).attentions
    loaded = AutoModel.from_pretrained(tmp_path / "out", output_attentions=True).eval()
    found = loaded(**inputs).attentions
    assert len(found) == len(expected) == TEXT["num_hidden_layers"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    loaded.config.output_attentions = False
    assert loaded(**inputs).attentions is None
    model.config.output_attentions = True
    linearize.save(model, tmp_path / "again")
    assert AutoModel.from_pretrained(tmp_path / "again").config.output_attentions is True


def test_only_weights_outside_kernels_can_be_absent(tmp_path):
    model = converted("bert")
    linearize.save(model, tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    kernel = "encoder.layer.0.attention.self.linear_attention.mixer.keys.weight"
    for bad in (f'["{kernel}"]', '"pooler"', "[1]"):
        text = config.read_text(encoding="utf-8").replace('"linearize": {', f'"linearize": {{"absent": {bad},', 1)
        (tmp_path / "edited.json").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match="absent"):
            transformers.AutoConfig.from_pretrained(tmp_path / "edited.json")


def test_a_tied_head_under_another_name_in_the_file(tmp_path):
    torch.manual_seed(0)
    text = {"model_type": "gemma", "vocab_size": 60, **HEADS, "num_key_value_heads": 1, "head_dim": 16}
    image = {"model_type": "siglip_vision_model", **HEADS, "image_size": 28, "patch_size": 14, "projection_dim": 32}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=image, image_token_index=59, projection_dim=32, hidden_size=32, pad_token_id=0
    )
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    inputs = {
        "input_ids": torch.tensor([[59, 59, 59, 59, 5, 6, 7]]),
        "pixel_values": torch.randn(1, 3, 28, 28),
        "attention_mask": torch.ones(1, 7, dtype=torch.long),
        "token_type_ids": torch.zeros(1, 7, dtype=torch.long),
    }
    linearize.convert(model, example_inputs=inputs)
    model.eval()
    linearize.save(model, tmp_path / "out")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_a_save_that_could_not_be_loaded_is_refused(tmp_path, monkeypatch):
    model = converted("bert")
    dropped = {key: value for key, value in model.state_dict().items() if key != "pooler.dense.bias"}
    with pytest.raises(CheckpointError, match=r"lacks 'pooler.dense.bias'"):
        linearize.save(model, tmp_path / "out", state_dict=dropped)
    assert not (tmp_path / "out").exists()


def test_a_host_with_a_cache_class_of_its_own():
    """MiniMax keeps the states of its own linear layers beside keys and values, in a class that it insists on."""
    torch.manual_seed(0)
    sizes = {
        **HEADS,
        "intermediate_size": 32,
        "vocab_size": 99,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "block_size": 8,
    }
    # torch's grouped product of experts knows no fp64.
    config = transformers.MiniMaxConfig(
        **sizes, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager"
    )
    model = transformers.MiniMaxForCausalLM(config).eval()
    linearize.convert(model)
    model.eval()
    ids = torch.arange(3, 12)[None]
    made = generate_and_check(model, {"input_ids": ids}, **GREEDY | {"max_new_tokens": 5})
    assert type(made.past_key_values).__name__ == "MiniMaxCache"
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def test_a_host_that_counts_the_keys_of_a_layer():
    torch.manual_seed(0)
    text = {**HEADS, "vocab_size": 99, "num_key_value_heads": 2, "cross_attention_layers": [], "pad_token_id": 0}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model = transformers.MllamaForCausalLM(transformers.models.mllama.MllamaTextConfig(**text)).eval()
    linearize.convert(model)
    model.eval()
    inputs = prompts(padded=False)
    generate_and_check(model, inputs, **GREEDY)


def test_a_host_that_attends_twice_in_a_layer_keeps_its_keys():
    """DiffLlama subtracts two attentions; the one state of a layer would serve the first of them alone."""
    torch.manual_seed(0)
    config = transformers.DiffLlamaConfig(**HEADS, num_key_value_heads=2, vocab_size=99, pad_token_id=0)
    model = transformers.DiffLlamaForCausalLM(config).eval()
    linearize.convert(model)
    _assert_generates_with_all_keys(model.eval())
    # Without a cache a shared layer is no hindrance.
    shared = transformers.AlbertModel(transformers.AlbertConfig(**TEXT, embedding_size=16))
    assert len(linearize.plan(shared).converted) == 1


def _assert_generates_with_all_keys(model):
    """It writes what full forwards write, padding in front included, from a cache that grows; no other is taken."""
    inputs = prompts()
    generate_and_check(model, inputs, **GREEDY)
    assert all(layer.cache_index is None for layer in linear_attentions(model).values())
    ids = torch.tensor([[5, 6, 7]])
    short, long = (model(ids.repeat(1, n), use_cache=True).past_key_values for n in (1, 3))
    assert cache_nbytes(long) > cache_nbytes(short)
    fixed = transformers.StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(ConfigError, match="linear attention needs a state or all keys"):
        model(ids, past_key_values=fixed, use_cache=True)


def test_a_part_with_a_config_of_its_own(tmp_path):
    """X-CLIP's part that joins the frames of a video makes a config for itself."""
    torch.manual_seed(0)
    vision = {**HEADS, "image_size": 16, "patch_size": 8, "num_frames": 2, "mit_hidden_size": 32}
    vision |= {"mit_intermediate_size": 37, "mit_num_hidden_layers": 1, "mit_num_attention_heads": 2}
    text = {**HEADS, "vocab_size": 99, "bos_token_id": 97, "eos_token_id": 98, "max_position_embeddings": 16}
    sizes = {"projection_dim": 32, "prompt_num_attention_heads": 2, "text_config": text, "vision_config": vision}
    model = transformers.XCLIPModel(transformers.XCLIPConfig(**sizes)).eval()
    linearize.convert(model)
    model.eval()
    used = []
    for name, layer in linear_attentions(model).items():
        layer.register_forward_pre_hook(lambda layer, args, name=name: used.append(name))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, 2, 3, 16, 16, generator=generator)
    inputs = {"input_ids": torch.tensor([[5, 6, 98]]), "pixel_values": pixels}
    before = model(**inputs).logits_per_video
    assert any(name.startswith("mit.") for name in used)
    linearize.save(model, tmp_path / "out")
    loaded = AutoModel.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(loaded(**inputs).logits_per_video, before, rtol=1e-6, atol=1e-6)


def test_buffers_that_a_body_fills_in_are_filled_in_by_a_load(tmp_path):
    """transformers leaves modules out that hold no weights themselves, where it takes a class for the user's own."""
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
    config = transformers.FalconH1Config(
        **HEADS, **mamba, num_key_value_heads=1, vocab_size=99, mamba_chunk_size=8, ssm_multipliers=[0.5] * 5
    )
    torch.manual_seed(0)
    model = transformers.FalconH1ForCausalLM(config).eval()
    linearize.convert(model)
    linearize.save(model, tmp_path / "out")
    loaded = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(loaded[name], buffer, rtol=0, atol=0)


def test_an_attention_shared_by_layers_keeps_its_keys(tmp_path):
    """Zamba 2 calls one attention at several depths, each with its place in the cache."""
    torch.manual_seed(0)
    sizes = {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "chunk_size": 8,
    }
    config = transformers.Zamba2Config(**HEADS | {"num_hidden_layers": 4}, **sizes, vocab_size=99, adapter_rank=4)
    model = transformers.Zamba2ForCausalLM(config).eval()
    linearize.convert(model)
    assert len(linear_attentions(model)) == 2
    _assert_generates_with_all_keys(model.eval())
    ids = torch.tensor([[5, 6, 7, 8]])
    linearize.save(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-6, atol=1e-6)


def test_layers_that_stay_keep_their_sinks():
    """MiMo-V2-Flash adds sinks to the scores of its local layers, which SDPA cannot: those layers stay as they were."""
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 1, "head_dim": 16, "v_head_dim": 16, "sliding_window": 3}
    sizes |= {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "dense"]}
    config = transformers.MiMoV2FlashConfig(**HEADS, **sizes, vocab_size=99, pad_token_id=0)
    model = transformers.MiMoV2FlashForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            if layer.self_attn.sinks is not None:
                layer.self_attn.sinks.fill_(2.0)
    inputs = prompts(padded=False)
    before = model(**inputs).logits
    linearize.convert(model)
    with observed(model, lambda *call: None):
        torch.testing.assert_close(model.eval()(**inputs).logits, before, rtol=1e-5, atol=1e-6)
    assert len(linear_attentions(model)) == 1
    generate_and_check(model, inputs, **GREEDY)


def test_attentions_chosen_by_the_implementations_name(tmp_path):
    """SAM has a table of classes by implementation, in which ours was not: a load could not build it again."""
    torch.manual_seed(0)
    vision = {**HEADS, "image_size": 32, "patch_size": 8, "output_channels": 16, "mlp_dim": 37, "num_pos_feats": 8}
    vision |= {"global_attn_indexes": [1], "window_size": 2}
    prompt = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "image_embedding_size": 4, "mask_input_channels": 4}
    decoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 37}
    decoder |= {"iou_head_hidden_dim": 16}
    config = transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    model = transformers.SamModel(config).eval()
    pixels = {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": torch.rand(1, 1, 2, 2) * 32}
    linearize.convert(model)
    before = model.eval()(**pixels).pred_masks
    linearize.save(model, tmp_path / "out")
    loaded = AutoModel.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(loaded(**pixels).pred_masks, before, rtol=1e-6, atol=1e-6)


def test_several_images_in_a_row():
    """Pixtral puts all images into one row, and makes a mask that keeps them apart."""
    torch.manual_seed(0)
    config = transformers.PixtralVisionConfig(
        hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    pixels, sizes = torch.randn(2, 3, 32, 32), torch.tensor([[32, 32], [32, 24]])
    model = linearize.convert(transformers.PixtralVisionModel(config).eval())
    with torch.no_grad():
        both = model(pixels, image_sizes=sizes)[0]
        one = [model(pixels[i : i + 1], image_sizes=sizes[i : i + 1])[0] for i in range(2)]
    torch.testing.assert_close(both, torch.cat(one, dim=1), rtol=1e-5, atol=1e-5)
    given = {"pixel_values": pixels, "image_sizes": sizes}
    plan = linearize.plan(transformers.PixtralVisionModel(config).eval(), example_inputs=given)
    assert len(plan.converted) == 2


def _assert_softmax_computes_what_it_did(model, inputs, **options):
    """Convert a model, and compare it with softmax in place of its kernels with the original; return it."""
    with torch.no_grad():
        before = model(**inputs).logits
        converted = linearize.convert(model, **options).eval()
        with observed(converted, lambda *call: None):
            after = converted(**inputs).logits
        assert torch.isfinite(converted(**inputs).logits).all()
    real = inputs.get("decoder_attention_mask", torch.ones(before.shape[:2])).bool()
    torch.testing.assert_close(after[real], before[real], rtol=1e-4, atol=1e-5)
    return converted


SEQ2SEQ = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
SEQ2SEQ |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "max_position_embeddings": 64}


@pytest.mark.parametrize("padded", [False, True])
def test_a_router_that_reads_the_mask(padded):
    """NLLB-MoE routes by the mask of its attention, which it expects as SDPA's."""
    torch.manual_seed(0)
    config = transformers.NllbMoeConfig(
        **SEQ2SEQ, num_experts=4, expert_capacity=100, router_jitter_noise=0.0, encoder_sparse_step=1, pad_token_id=1
    )
    ids, mask = torch.arange(3, 13).view(2, 5), torch.ones(2, 5, dtype=torch.long)
    if padded:
        ids[1, -2:], mask[1, -2:] = 1, 0
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    model = transformers.NllbMoeForConditionalGeneration(config).eval()
    model = _assert_softmax_computes_what_it_did(model, inputs)
    assert model.generate(input_ids=ids, attention_mask=mask, **GREEDY).shape[0] == 2


def test_convolutions_that_read_the_mask():
    """LASR's convolutions leave out frames that the mask of its attention hides."""
    torch.manual_seed(0)
    encoder = transformers.LasrEncoderConfig(
        **HEADS, num_mel_bins=16, conv_kernel_size=8, subsampling_conv_channels=8, attention_bias=False
    )
    model = transformers.LasrForCTC(transformers.LasrCTCConfig(encoder_config=encoder, vocab_size=32)).eval()
    mask = torch.ones(2, 128, dtype=torch.long)
    mask[1, 64:] = 0
    inputs = {"input_features": torch.randn(2, 128, 16), "attention_mask": mask}
    with torch.no_grad():
        before = model(**inputs).logits[1, : model._get_output_attention_mask(mask).sum(-1)[1]]
        with observed(linearize.convert(model).eval(), lambda *call: None):
            after = model(**inputs).logits[1, : len(before)]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(model(**inputs).logits).all()


def test_a_part_with_attention_of_its_own_runs_as_before(tmp_path):
    """BigBird-Pegasus shares one config between a converted decoder and an encoder that adds its mask to the scores."""
    torch.manual_seed(0)
    config = transformers.BigBirdPegasusConfig(**SEQ2SEQ, pad_token_id=0, block_size=4, num_random_blocks=1)
    ids, mask = torch.randint(3, 99, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, -2:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :5]}
    model = transformers.BigBirdPegasusForConditionalGeneration(config).eval()
    model = _assert_softmax_computes_what_it_did(model, inputs)
    linearize.save(model, tmp_path / "out")
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert model.generate(input_ids=ids, attention_mask=mask, **GREEDY).shape[0] == 2


def test_an_implementation_of_softmax_is_never_taken_silently():
    model = converted("clip")
    inputs = inputs_of(model)
    before = model(**inputs).logits_per_text
    with pytest.warns(UserWarning, match="runs its own linear attention.* the name is ignored"):
        model.config._attn_implementation = "eager"
    assert torch.equal(model(**inputs).logits_per_text, before)
    model.config.text_config._attn_implementation = "eager"
    with pytest.raises(ConfigError, match="got attn_implementation='eager'"):
        model(**inputs)


def test_a_stack_whose_numbers_another_one_has():
    """BLT's global layers, which have no cache, have the numbers of its local ones, which stay and have one."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    stack = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    stack |= {"intermediate_size": 32, "max_position_embeddings": 64, "rope_parameters": rope, "dropout": 0.0}
    hashes = {"byte_group_size": [2, 3], "byte_group_vocab": 64, "byte_group_nb_functions": 1}
    config = transformers.BltConfig(
        vocab_size=32,
        max_position_embeddings=64,
        patch_in_forward=False,
        patch_size=4,
        **{f"encoder_hash_{key}": value for key, value in hashes.items()},
        **{f"{part}_config": stack for part in ("patcher", "encoder")},
        decoder_config={**stack, "vocab_size": 32, "hidden_size_global": 32},
        global_config={**stack, "hidden_size": 32},
        rope_parameters=rope,
        tie_word_embeddings=False,
    )
    config.num_hidden_layers, config.num_attention_heads, config.hidden_size = 1, 2, 16
    model = linearize.convert(transformers.BltForCausalLM(config).eval()).eval()
    assert list(linear_attentions(model)) == ["model.global_transformer.layers.0.self_attn"]
    assert model.generate(torch.arange(3, 12)[None], **GREEDY).shape[1] > 9


def test_eager_softmax_goes_by_its_mask_alone():
    """BridgeTower's joint layers say that they are causal, and get no mask: they never hide anything."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 32, "patch_size": 16}
    text = {**sizes, "vocab_size": 99, "max_position_embeddings": 64}
    config = transformers.BridgeTowerConfig(text_config=text, vision_config=vision, **sizes)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    inputs = {"input_ids": torch.arange(3, 17).view(2, 7), "attention_mask": mask}
    inputs["pixel_values"] = torch.randn(2, 3, 32, 32)
    for kept in ((), range(3)):
        model = transformers.BridgeTowerForMaskedLM(config).eval()
        _assert_softmax_computes_what_it_did(model, inputs, keep_softmax=kept)


def test_causal_layers_that_keep_eager_softmax():
    """Gemma 2 supports only eager softmax, whose mask of numbers marks the padding but not the later tokens."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **HEADS, head_dim=16, vocab_size=99, num_key_value_heads=1, layer_types=["full_attention"] * 2,
        attn_logit_softcapping=None,
    )  # fmt: skip
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    inputs = {"input_ids": torch.arange(3, 17).view(2, 7), "attention_mask": mask}
    model = transformers.Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        before = model(**inputs).logits
        converted = linearize.convert(model, keep_softmax=[1]).eval()
        with observed(converted, lambda *call: None):
            after = converted(**inputs).logits
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()], rtol=1e-4, atol=1e-5)


def test_a_forecaster_that_fills_up_with_padding():
    torch.manual_seed(0)
    sizes = {"patch_length": 32, "context_length": 512, "horizon_length": 128, "head_dim": 8, "num_attention_heads": 2}
    config = transformers.TimesFmConfig(num_hidden_layers=2, hidden_size=16, intermediate_size=32, **sizes)
    model = transformers.TimesFmModelForPrediction(config).eval()
    inputs = {"past_values": [torch.linspace(0, 9, count).sin() for count in (100, 400)], "freq": torch.tensor([0, 1])}
    with torch.no_grad():
        before = model(**inputs).mean_predictions
        with observed(linearize.convert(model), lambda *call: None):
            after = model.eval()(**inputs).mean_predictions
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(model(**inputs).mean_predictions).all()


def test_a_cache_that_only_the_text_says_it_uses():
    """Qwen3-Omni's text has a window that it does not use, for which transformers would make a cache of windows."""
    torch.manual_seed(0)
    text = {**HEADS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "sliding_window": 50}
    text |= {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4, "use_sliding_window": False}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    audio = {"d_model": 32, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "encoder_layers": 2, "output_dim": 32}
    audio |= {"num_mel_bins": 20, "downsample_hidden_size": 32}
    vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 24, "num_heads": 4}
    vision |= {"patch_size": 16, "spatial_merge_size": 1, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3OmniMoeThinkerConfig(audio_config=audio, vision_config=vision, text_config=text)
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()
    linearize.convert(model)
    ids = torch.arange(9, 16)[None]
    with torch.no_grad():
        cached, plain = (model.eval()(input_ids=ids, use_cache=use_cache) for use_cache in (None, False))
    torch.testing.assert_close(cached.logits, plain.logits, rtol=1e-5, atol=1e-5)
    assert type(cached.past_key_values).__name__ == "LinearizeCache"


def test_a_tower_with_a_cache_of_its_own():
    """Voxtral Realtime reads sound with a sliding cache, and adds it to the text token by token."""
    torch.manual_seed(0)
    text = {**HEADS, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 99, "sliding_window": 32}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    audio = {**HEADS, "head_dim": 16, "num_mel_bins": 16, "sliding_window": 32, "max_position_embeddings": 128}
    audio |= {"num_key_value_heads": 2}
    config = transformers.VoxtralRealtimeConfig(text_config=text, audio_config=audio)
    model = transformers.VoxtralRealtimeForConditionalGeneration(config).eval()
    linearize.convert(model, local_as_full=True)
    assert len(linear_attentions(model)) == 4
    inputs = {"input_ids": torch.arange(3, 13).view(2, 5), "input_features": torch.randn(2, 16, 5 * 8)}
    with torch.no_grad():
        cached, plain = (model.eval()(**inputs, use_cache=use_cache).logits for use_cache in (True, False))
    torch.testing.assert_close(cached, plain, rtol=1e-5, atol=1e-5)
    longer = inputs | {"input_features": torch.randn(2, 16, 20 * 8)}
    assert model.generate(**longer, **GREEDY | {"max_new_tokens": 4}).shape == (2, 9)
