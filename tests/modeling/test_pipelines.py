"""A converted model in each pipeline of transformers: with softmax's own weights it answers what the original answers.

A pipeline chooses its pre- and post-processing by the model's class name, `model_type` or the class of its config.
"""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support.checkpoints import WORDS, tokenizer
from support.tiny import CLIP_TEXT, ENDS, IMAGE, TEXT, original
from transformers import PreTrainedModel, pipeline
from transformers.pipelines import SUPPORTED_TASKS

import linearize
from linearize.modeling.model import LinearizedModel

SOUND = np.sin(np.arange(8000) ** 1.3 / 50).astype(np.float32)
PICTURE = Image.fromarray(np.arange(40 * 40 * 3, dtype=np.uint8).reshape(40, 40, 3) * 7)
QUESTION = "how very fast can one run"
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 99,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "init_std": 0.3,
}  # fmt: skip
WAV2VEC2 = {
    **TEXT, "conv_dim": [16, 16], "conv_stride": [10, 8], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "pad_token_id": 0,
}  # fmt: skip
FEW = {"max_new_tokens": 6}
LABELS = {"id2label": {0: "contradiction", 1: "neutral", 2: "entailment"}, "label2id": {"entailment": 2}}


def model_of(name: str, config: Any, std: float = 0.3) -> PreTrainedModel:
    """A tiny model with weights large enough for its answers to differ."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in key:
                weight.normal_(std=std)
    return model


def dual(kind: str, text: dict[str, Any], **more: Any) -> PreTrainedModel:
    """CLIP, SigLIP or OWL-ViT."""
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=IMAGE, **more)
    return model_of(f"{kind}{'ForObjectDetection' if kind == 'OwlViT' else 'Model'}", config, std=0.1)


def whisper() -> tuple[PreTrainedModel, dict[str, Any]]:
    """With the start, language and time tokens by which its pipeline cuts a text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    marks = ["startoftranscript", "en", "translate", "transcribe", "startoflm", "startofprev", "nospeech"]
    special = ["<|endoftext|>", *(f"<|{mark}|>" for mark in [*marks, "notimestamps"])]
    times = [f"<|{i * 0.02:.2f}|>" for i in range(1501)]
    vocabulary = {token: i for i, token in enumerate([*bytes_to_unicode().values(), *special])}
    words = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    words.add_special_tokens({"additional_special_tokens": special[1:]})
    words.add_tokens(times)
    number = words.convert_tokens_to_ids
    config = transformers.WhisperConfig(
        **SEQ2SEQ | {"vocab_size": len(words), "num_mel_bins": 8, "max_source_positions": 50},
        **{
            "max_target_positions": 64,
            "decoder_start_token_id": number(special[1]),
            "pad_token_id": number(special[0]),
        },
        **{"bos_token_id": number(special[0]), "eos_token_id": number(special[0]), "suppress_tokens": None},
    )
    model = model_of("WhisperForConditionalGeneration", config)
    settings = {
        "no_timestamps_token_id": number(special[-1]),
        "is_multilingual": True,
        "max_initial_timestamp_index": 5,
    }
    settings |= {"lang_to_id": {"<|en|>": number("<|en|>")}, "alignment_heads": [[0, 0], [1, 1]]}
    settings |= {"task_to_id": {task: number(f"<|{task}|>") for task in ("translate", "transcribe")}}
    for key, value in {**settings, "_from_model_config": False}.items():
        setattr(model.generation_config, key, value)
    sound = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    return model, {"tokenizer": words, "feature_extractor": sound}


def moonshine() -> tuple[PreTrainedModel, dict[str, Any]]:
    sizes = {
        f"{side}_{key}": 2 for side in ("encoder", "decoder") for key in ("num_hidden_layers", "num_key_value_heads")
    }
    heads = {"encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2}
    config = transformers.MoonshineConfig(
        vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=37, **sizes, **heads, pad_token_id=0
    )
    model = model_of("MoonshineForConditionalGeneration", config)
    return model, {"tokenizer": tokenizer(), "feature_extractor": transformers.Wav2Vec2FeatureExtractor()}


def speech_to_text() -> tuple[PreTrainedModel, dict[str, Any]]:
    sizes = {"conv_channels": 16, "input_feat_per_channel": 8, "max_source_positions": 200, "max_target_positions": 40}
    model = model_of("Speech2TextForConditionalGeneration", transformers.Speech2TextConfig(**SEQ2SEQ, **sizes))
    sound = transformers.Speech2TextFeatureExtractor(feature_size=8, num_mel_bins=8)
    return model, {"tokenizer": tokenizer(), "feature_extractor": sound}


def wav2vec2(name: str, **more: Any) -> Callable[[], tuple[PreTrainedModel, dict[str, Any]]]:
    def make() -> tuple[PreTrainedModel, dict[str, Any]]:
        config = transformers.Wav2Vec2Config(**WAV2VEC2 | {"vocab_size": 30, **more})
        letters = {letter: i for i, letter in enumerate(["<pad>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"])}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(letters, file)
            file.flush()
            reader = transformers.Wav2Vec2CTCTokenizer(file.name)
        extras: dict[str, Any] = {
            "feature_extractor": transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
        }
        return model_of(name, config), extras | ({"tokenizer": reader} if name.endswith("CTC") else {})

    return make


def text(name: str, head: str, **more: Any) -> Callable[[], tuple[PreTrainedModel, dict[str, Any]]]:
    return lambda: (original(name, head, **more), {"tokenizer": tokenizer(ends=name != "gpt2")})


def pictures(name: str, config: str, values: dict[str, Any], processor: str = "ViTImageProcessor", **more: Any) -> Any:
    size = more.pop("size", {"height": 30, "width": 30})
    images = lambda: getattr(transformers, processor)(size=size, **more)  # noqa: E731
    return lambda: (model_of(name, getattr(transformers, config)(**values)), {"image_processor": images()})


def both(kind: str, words: dict[str, Any], processor: str, **more: Any) -> Callable[[], Any]:
    def make() -> tuple[PreTrainedModel, dict[str, Any]]:
        images = getattr(transformers, processor)(size={"height": 30, "width": 30}, do_center_crop=False)
        reader = tokenizer(16)
        # SigLIP's own makes no mask: its text is pooled at the last token, which may be padding.
        reader.model_input_names = ["input_ids", "attention_mask"][: 1 if kind == "Siglip" else 2]
        return dual(kind, words, **more), {"tokenizer": reader, "image_processor": images}

    return make


def clap() -> tuple[PreTrainedModel, dict[str, Any]]:
    """Its audio tower adds a bias to the scores, and stays softmax."""
    sound = {
        "window_size": 4, "num_mel_bins": 8, "spec_size": 32, "patch_stride": [4, 4], "hidden_size": 32,
        "depths": [2, 2], "num_attention_heads": [2, 2], "num_classes": 4, "patch_embeds_hidden_size": 16,
        "aff_block_r": 2,
    }  # fmt: skip
    words = {**TEXT, "pad_token_id": 0, "max_position_embeddings": 66}
    config = transformers.ClapConfig(text_config=words, audio_config=sound, projection_dim=32)
    listens = transformers.ClapFeatureExtractor(
        feature_size=8, sampling_rate=16000, max_length_s=1, fft_window_size=256, hop_length=500, frequency_max=8000,
        truncation="rand_trunc", padding="repeatpad",
    )  # fmt: skip
    model = model_of("ClapModel", config)
    return model, {"tokenizer": tokenizer(16), "feature_extractor": listens}


def layoutlm() -> tuple[PreTrainedModel, dict[str, Any]]:
    model = model_of(
        "LayoutLMForQuestionAnswering", transformers.LayoutLMConfig(**TEXT, max_2d_position_embeddings=1024)
    )
    return model, {"tokenizer": tokenizer()}


def llava() -> tuple[PreTrainedModel, dict[str, Any]]:
    reader = tokenizer()
    reader.add_special_tokens({"additional_special_tokens": ["<image>"]})
    parts = {
        "text_config": {"model_type": "llama", **TEXT, **ENDS, "num_key_value_heads": 2},
        "vision_config": {"model_type": "clip_vision_model", **IMAGE},
    }
    number = reader.convert_tokens_to_ids("<image>")
    config = transformers.LlavaConfig(**parts, image_token_id=number, vision_feature_layer=-1)
    images = transformers.CLIPImageProcessor(size={"height": 30, "width": 30}, do_center_crop=False)
    options = {"patch_size": 10, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = transformers.LlavaProcessor(image_processor=images, tokenizer=reader, **options)
    return model_of("LlavaForConditionalGeneration", config), {"processor": processor}


def sam() -> tuple[PreTrainedModel, dict[str, Any]]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
    config = transformers.SamConfig(
        vision_config={
            **sizes,
            "output_channels": 16,
            "window_size": 0,
            "use_rel_pos": False,
            "mlp_dim": 16,
            "num_pos_feats": 8,
        },
        prompt_encoder_config={**sizes, "mask_input_channels": 4},
        mask_decoder_config={**sizes, "mlp_dim": 16, "iou_head_hidden_dim": 16},
    )
    lengths = {"size": {"longest_edge": 64}, "mask_size": {"longest_edge": 16}}
    pads = {"pad_size": {"height": 64, "width": 64}, "mask_pad_size": {"height": 16, "width": 16}}
    return model_of("SamModel", config), {"image_processor": transformers.SamImageProcessor(**lengths, **pads)}


ASKED = {"images": PICTURE, "text": "<image> the cat", "min_new_tokens": 4, "max_new_tokens": 4}
BOXES = {
    "image": PICTURE,
    "question": QUESTION,
    "word_boxes": [(w, [i, i, i + 9, i + 9]) for i, w in enumerate(WORDS[:9])],
}
DPT = {
    **IMAGE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8],
    "fusion_hidden_size": 8, "image_size": 32, "patch_size": 16,
}  # fmt: skip
YOLOS = {**IMAGE, "image_size": [30, 30], "num_detection_tokens": 5}
SEGFORMER = {
    "depths": [1, 1], "num_encoder_blocks": 2, "sr_ratios": [2, 1], "hidden_sizes": [16, 16], "patch_sizes": [7, 3],
    "strides": [4, 2], "num_attention_heads": [2, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
}  # fmt: skip
Case = tuple[Callable[[], tuple[PreTrainedModel, dict[str, Any]]], tuple[Any, ...], dict[str, Any]]

CASES: dict[str, dict[str, Case]] = {
    "any-to-any": {"llava": (llava, (), ASKED)},
    "image-text-to-text": {"llava": (llava, (), ASKED)},
    "mask-generation": {
        "sam": (sam, (PICTURE,), {"points_per_crop": 3, "pred_iou_thresh": -99, "stability_score_thresh": -1}),
    },
    "audio-classification": {"wav2vec2": (wav2vec2("Wav2Vec2ForSequenceClassification"), (SOUND,), {})},
    "automatic-speech-recognition": {
        "whisper": (whisper, (SOUND,), {"generate_kwargs": FEW}),
        "whisper, sentences": (whisper, (SOUND,), {"generate_kwargs": FEW, "return_timestamps": True}),
        "whisper, words": (whisper, (SOUND,), {"generate_kwargs": FEW, "return_timestamps": "word"}),
        "whisper, chunks": (whisper, (np.tile(SOUND, 5),), {"generate_kwargs": FEW, "chunk_length_s": 1}),
        "moonshine": (moonshine, (SOUND,), {"generate_kwargs": FEW}),
        "moonshine, chunks": (moonshine, (SOUND,), {"generate_kwargs": FEW, "chunk_length_s": 0.25}),
        "speech_to_text": (speech_to_text, (SOUND,), {"generate_kwargs": FEW}),
        "wav2vec2": (wav2vec2("Wav2Vec2ForCTC"), (SOUND,), {}),
        "wav2vec2, letters": (wav2vec2("Wav2Vec2ForCTC"), (SOUND,), {"return_timestamps": "char"}),
        "wav2vec2, chunks": (wav2vec2("Wav2Vec2ForCTC"), (SOUND,), {"chunk_length_s": 0.25}),
    },
    "feature-extraction": {"bert": (text("bert", "AutoModel"), (QUESTION,), {})},
    "text-classification": {"bert": (text("bert", "AutoModelForSequenceClassification"), (QUESTION,), {"top_k": None})},
    "token-classification": {"bert": (text("bert", "AutoModelForTokenClassification"), (QUESTION,), {})},
    "document-question-answering": {"layoutlm": (layoutlm, (BOXES,), {})},
    "fill-mask": {"bert": (text("bert", "AutoModelForMaskedLM"), (f"{QUESTION} <mask>",), {})},
    "text-generation": {
        name: (text(name, "AutoModelForCausalLM"), (QUESTION,), {**FEW, "do_sample": False})
        for name in ("gpt2", "llama")
    },
    "zero-shot-classification": {
        "bert": (text("bert", "AutoModelForSequenceClassification", **LABELS), (QUESTION, WORDS[:3]), {}),
    },
    "zero-shot-image-classification": {
        "clip": (both("CLIP", CLIP_TEXT, "CLIPImageProcessor"), (PICTURE, WORDS[:3]), {}),
        "siglip": (both("Siglip", TEXT, "SiglipImageProcessor"), (PICTURE, WORDS[:3]), {}),
    },
    "zero-shot-object-detection": {
        "owlvit": (
            both("OwlViT", CLIP_TEXT, "OwlViTImageProcessor", projection_dim=32),
            (PICTURE, WORDS[:3]),
            {"threshold": 0.0},
        ),
    },
    "zero-shot-audio-classification": {"clap": (clap, (SOUND,), {"candidate_labels": WORDS[:3]})},
    "image-classification": {"vit": (pictures("ViTForImageClassification", "ViTConfig", IMAGE), (PICTURE,), {})},
    "image-feature-extraction": {"vit": (pictures("ViTModel", "ViTConfig", IMAGE), (PICTURE,), {})},
    "image-segmentation": {
        "segformer": (
            pictures("SegformerForSemanticSegmentation", "SegformerConfig", SEGFORMER, "SegformerImageProcessor"),
            (PICTURE,),
            {},
        )
    },
    "object-detection": {
        "yolos": (
            pictures("YolosForObjectDetection", "YolosConfig", YOLOS, "YolosImageProcessor", do_pad=False),
            (PICTURE,),
            {"threshold": 0.0},
        )
    },
    "depth-estimation": {
        "dpt": (
            pictures("DPTForDepthEstimation", "DPTConfig", DPT, "DPTImageProcessor", size={"height": 32, "width": 32}),
            (PICTURE,),
            {},
        )
    },
}  # fmt: skip
UNTRIED = {
    "decision": "its models carry a decision head in a file of their own",
    "keypoint-matching": "the detector of a tiny model finds no points",
    "table-question-answering": "its models' attention has code of its own, which is refused",
    "text-to-audio": "its models carry a codec",
    "video-classification": "it reads videos with a package that the tests do not need",
}


def test_every_task_is_tried_or_says_why_not():
    assert SUPPORTED_TASKS.keys() >= CASES.keys()
    assert SUPPORTED_TASKS.keys() - CASES.keys() <= UNTRIED.keys()


def compare(got: Any, expected: Any) -> int:
    """Compare answers of any nesting; return how many numbers and texts there were."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        return sum(compare(got[key], value) for key, value in expected.items())
    if isinstance(expected, (list, tuple)):
        if expected and all(isinstance(x, dict) and "label" in x and "score" in x for x in (*expected, *got)):
            # Nearly equal scores may change places.
            expected, got = (sorted(x, key=lambda one: str(one["label"])) for x in (expected, got))
        return sum(itertools.starmap(compare, zip(got, expected, strict=True)))
    if isinstance(expected, Image.Image):
        expected, got = np.asarray(expected, dtype=np.float32), np.asarray(got, dtype=np.float32)
        assert np.abs(got - expected).max() <= 1  # Pixels of 256 steps.
        return 1
    if isinstance(expected, torch.Tensor) and expected.dtype == torch.bool:
        assert (got != expected).float().mean() < 1e-3  # A pixel on the border may fall on either side.
        return 1
    if isinstance(expected, (float, np.ndarray, np.floating, torch.Tensor)):
        torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(expected), rtol=1e-4, atol=1e-4)
        return 1
    assert got == expected
    return 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "case"), [(task, case) for task, cases in CASES.items() for case in cases])
def test_a_converted_model_answers_as_the_original(task, case, tmp_path):
    make, inputs, options = CASES[task][case]
    stock, extras = make()
    model = linearize.convert(copy.deepcopy(stock), "none", window=1024)
    model.save_pretrained(tmp_path)
    expected = pipeline(task, stock, device="cpu", **extras)(*inputs, **options)
    opened = pipeline(task, str(tmp_path), device="cpu", **extras)
    assert isinstance(opened.model, LinearizedModel)
    assert compare(opened(*inputs, **options), expected)
