"""A conversion holds the model, with softmax in place of its kernels, against what it was, and refuses what differs."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.tiny import IMAGE, original

import linearize
from linearize.attention.interface import linear_attentions, observed
from linearize.conversion.attentions import trial_runs
from linearize.conversion.check import check, record
from linearize.core.errors import UnsupportedModelError

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 37}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "bart", "clip"])
def test_ordinary_models_are_held_against_themselves(name):
    model = original(name)
    recorded = record(trial_runs(model)[0])
    # With padding and without it, because masks that hide nothing are left out.
    masked = [True, False] if name in ("bert", "gpt2", "llama", "bart") else [False]
    assert ["attention_mask" in batch for _, batch, _ in recorded] == masked
    for module, _, before in recorded:
        assert module is model
        assert all(float(x.abs().max()) > 0 for x in before)
    check(linearize.convert(model), recorded)


def test_a_host_that_reads_the_mask_elsewhere_is_refused():
    model = original("bert")
    encoder = type(model.encoder)

    class Elsewhere(encoder):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            # A mask per pair of tokens where softmax attends, one per key where linear attention does.
            pairs = attention_mask is None or attention_mask.shape[2] > 1
            return super().forward(hidden_states.roll(0 if pairs else 1, -1), attention_mask, **kwargs)

    model.encoder.__class__ = Elsewhere
    with pytest.raises(UnsupportedModelError, match=r"computes something else .* expected at most 1e-05\), so it is"):
        linearize.convert(model)


def test_a_host_that_cannot_take_the_mask_is_refused():
    model = original("bert")
    encoder = type(model.encoder)

    class Pairs(encoder):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            assert attention_mask.shape[2] > 1, "expected a mask per pair"
            return super().forward(hidden_states, attention_mask, **kwargs)

    model.encoder.__class__ = Pairs
    with pytest.raises(UnsupportedModelError, match=r"no longer runs .*expected a mask per pair"):
        linearize.convert(model)


def test_half_precision_has_a_bound_of_its_own():
    linearize.convert(original("bert").to(torch.bfloat16))


def test_a_host_that_chooses_classes_by_the_implementations_name_is_refused():
    model = original("bert")
    base = type(model)

    class Choosy(base):
        def __init__(self, config, *args, **kwargs):
            self.choice = {"eager": 1, "sdpa": 2}[config._attn_implementation or "sdpa"]
            super().__init__(config, *args, **kwargs)

    model.__class__ = Choosy
    with pytest.raises(UnsupportedModelError, match=r"can no longer be built .*KeyError: 'linearize'"):
        linearize.convert(model)


def test_a_model_that_draws_numbers_is_held_against_itself():
    torch.manual_seed(0)
    sizes = {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4, "decoder_hidden_size": 32}
    config = transformers.ViTMAEConfig(**IMAGE, **sizes, decoder_intermediate_size=37, norm_pix_loss=False)
    model = transformers.ViTMAEForPreTraining(config).eval()
    recorded = record(trial_runs(model)[0])
    assert len(recorded) == 1
    check(linearize.convert(model), recorded)


def test_a_part_that_writes_softmax_out_keeps_its_masks():
    """GIT's text adds a mask to scores that it writes out; the tower of its images is converted."""
    torch.manual_seed(0)
    vision = {**HEADS, "image_size": 16, "patch_size": 8}
    config = transformers.GitConfig(**HEADS, vision_config=vision, vocab_size=99, pad_token_id=0, bos_token_id=1)
    model = transformers.GitForCausalLM(config).eval()
    ids, mask = torch.randint(3, 90, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(2, 3, 16, 16)}
    with torch.no_grad():
        before = model(**inputs).logits
        with observed(linearize.convert(model), lambda *call: None):
            after = model.eval()(**inputs).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert set(linear_attentions(model)) == {
        f"git.image_encoder.vision_model.encoder.layers.{number}.self_attn" for number in range(2)
    }


def test_a_pooler_that_reads_the_mask_computes_what_it_did():
    """SigLIP 2's pooling head attends over the patches under the mask that its encoder was given."""
    torch.manual_seed(0)
    config = transformers.Siglip2VisionConfig(**HEADS, patch_size=4, num_patches=16)
    model = transformers.Siglip2VisionModel(config).eval()
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    inputs = {
        "pixel_values": torch.randn(2, 16, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }
    with torch.no_grad():
        before = model(**inputs).pooler_output
    linearize.convert(model, example_inputs=inputs)
    with torch.no_grad(), observed(model.eval(), lambda *call: None):
        torch.testing.assert_close(model(**inputs).pooler_output, before, rtol=1e-5, atol=1e-6)


def test_what_stands_at_padding_does_not_count_in_outputs_of_other_shapes():
    """CSM's depth decoder gives nothing for the first token, MusicGen's a row for every codebook."""
    torch.manual_seed(0)
    sizes = {**HEADS, "vocab_size": 99, "pad_token_id": 0}
    config = transformers.CsmDepthDecoderConfig(
        **sizes, num_codebooks=9, backbone_hidden_size=32, num_key_value_heads=2
    )
    model = transformers.CsmDepthDecoderForCausalLM(config).eval()
    (_, batch, outputs), _ = record(trial_runs(model)[0])
    assert batch["attention_mask"].shape == (2, 7) and outputs[0].shape[:2] == (2, 6)
    linearize.convert(model)
    config = transformers.MusicgenMelodyDecoderConfig(**sizes, ffn_dim=37, num_codebooks=2, is_decoder=True)
    model = transformers.MusicgenMelodyForCausalLM(config).eval()
    assert record(trial_runs(model)[0])[0][1]["input_ids"].shape[1] == 7
    assert len(linear_attentions(linearize.convert(model))) == 2


def test_a_head_that_reads_a_token_of_padding_is_no_reason():
    """GPT-2's choice is taken from the last token, whatever it is: of padding it is compared on rows without any."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64, "pad_token_id": 0}
    model = transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**sizes)).eval()
    padded, whole = record(trial_runs(model)[0])
    assert [x is None for x in padded[2]] == [False, True] and None not in whole[2]
    assert "attention_mask" in padded[1] and "attention_mask" not in whole[1]
    converted = linearize.convert(model)
    # A head that goes wrong is seen all the same.
    converted.multiple_choice_head.register_forward_hook(lambda module, args, out: out + 1.0)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        check(converted, [padded, whole])


def test_a_head_that_looks_for_the_padding_is_compared_with_padding():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64, "pad_token_id": 0}
    model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes)).eval()
    padded, _ = record(trial_runs(model)[0])
    assert "attention_mask" in padded[1] and None not in padded[2]


def test_eager_weights_of_padding_are_not_compared():
    config = transformers.LlamaConfig(
        **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "pad_token_id": 0},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
        output_attentions=True,
        attn_implementation="eager",
    )
    model = linearize.convert(transformers.LlamaForCausalLM(config).eval())
    assert len(model(torch.arange(1, 6)[None]).attentions) == 2
