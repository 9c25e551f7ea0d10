"""Sizes that the rule of `shrink.py` does not make fit, by folder of transformers; data alone.

Names are dotted where they lie in a config inside the config.
"""

from __future__ import annotations

from typing import Any

DEFAULT = object()
"""The value that the config has by itself."""
ABSENT = object()
"""No value: the config works it out from others."""
CLASS = "class"
"""Name of the class that is tried."""

_LINE = {"pixel_values": (1, 3, 48, 320)}
INPUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "muse_glimmer_assistant": {"noise_embeds": (1, 5, 32), "context_hidden_states": (1, 7, 64)},
    "pp_ocrv5_mobile_rec": {"pixel_values": (1, 3, 96, 640)},
    "pp_ocrv5_server_rec": _LINE,
    "pp_ocrv6_small_rec": _LINE,
}
"""Example inputs, as shapes of random numbers, where linearize has to ask for them."""

_HGNET: dict[str, Any] = {
    "backbone_config.stem_channels": [3, 16, 16],
    "backbone_config.stage_in_channels": [16, 16, 32, 64],
    "backbone_config.stage_mid_channels": [8, 8, 16, 16],
    "backbone_config.stage_out_channels": [16, 32, 64, 128],
    "backbone_config.stage_num_blocks": [1, 1, 1, 1],
    "backbone_config.stage_numb_of_layers": [1, 1, 1, 1],
    "backbone_config.hidden_sizes": [16, 32, 64, 128],
}
_DETECTOR: dict[str, Any] = _HGNET | {
    "encoder_in_channels": [32, 64, 128],
    "num_queries": 20,
    "anchor_image_size": None,
}
_SAM: dict[str, Any] = {
    "vision_config.num_pos_feats": 16,
    "prompt_encoder_config.image_embedding_size": 4,
}
_HIERA: dict[str, Any] = {
    "vision_config.backbone_config.embed_dim_per_stage": [32, 64, 128, 256],
    "vision_config.backbone_config.num_attention_heads": 1,
    "vision_config.backbone_config.num_attention_heads_per_stage": [1, 2, 4, 8],
    "vision_config.backbone_config.blocks_per_stage": [1, 1, 2, 1],
    "vision_config.backbone_config.global_attention_blocks": [3],
    "vision_config.backbone_config.window_size_per_stage": [8, 4, 4, 4],
    "vision_config.backbone_channel_list": [256, 128, 64, 32],
    "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}
_PE: dict[str, Any] = {
    "vision_config.architecture": "vit_pe_core_tiny_patch16_384",
    "vision_config.model_args": {"depth": 1, "img_size": 224},
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_HALF = _SECTIONS | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
_SERIES: dict[str, Any] = {"prediction_length": 6, "context_length": 10}

OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {
        CLASS: "BltForCausalLM",
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [2, 3],
        "patch_in_forward": False,
        "cross_attn_k": 2,
        "decoder_config.hidden_size_global": 32,
        "num_hidden_layers": 2,
    },
    "bridgetower": {
        CLASS: "BridgeTowerForMaskedLM",
        **{f"{part}hidden_size": 64 for part in ("", "text_config.", "vision_config.")},
    },
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGAZ": 5, "IMGIMGBZ": 6}},
    "codegen": {"rotary_dim": 4},
    "d_fine": _DETECTOR,
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.kv_n_heads": 2, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {
        "text_config.num_experts_per_tok": 2,
        "text_config.n_group": 1,
        "text_config.topk_group": 1,
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "vision_config.sam_config.downsample_channels": [32, 32],
    },
    "deformable_detr": {"d_model": 64},
    "deimv2": _DETECTOR,
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 16,
    },
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention"] * 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "edgetam": {
        "vision_config.backbone_config.architecture": "resnet10t",
        "vision_config.backbone_config.model_args": {"in_chans": 3, "features_only": True, "out_indices": [1, 2, 3, 4]},
        "vision_config.backbone_channel_list": [512, 256, 128, 64],
        "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "edgetam_video": _HIERA,
    "efficientloftr": {
        "out_features": [8, 8, 16, 32],
        "stage_num_blocks": [1, 1, 1, 1],
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        **dict.fromkeys(("stage_in_channels", "stage_block_stride", "stage_block_out_channels"), ABSENT),
        **dict.fromkeys(("stage_block_in_channels", "fine_fusion_dims", "intermediate_size"), ABSENT),
    },
    "eomt": {"num_blocks": 1},
    "eomt_dinov3": {"num_blocks": 1},
    "esmfold2": {
        f"{place}.{key}": 1
        for place in ("atom_encoder", "structure_head.diffusion_module.atom_encoder")
        for key in ("num_spatial_rope_pairs_per_axis", "num_uid_rope_pairs")
    }
    | {"single_inputs_size": 99},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
    "falcon_h1": {"mamba_d_ssm": 64},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8, "audio_config.max_position_embeddings": 129},
    "gemma3n": {"text_config.num_kv_shared_layers": 0, "num_kv_shared_layers": 0},
    **{key: {"text_config.rope_parameters": _SECTIONS} for key in ("glm4v", "glm_image", "glm_ocr")},
    "glm4v_moe": {"text_config.rope_parameters": _HALF},
    **{key: {"text_config.rope_parameters": _SECTIONS} for key in ("qwen2_vl", "qwen2_5_vl")},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_experts_per_tok": 2},
    "bamba": {"attn_layer_indices": [1]},
    "informer": _SERIES,
    "kyutai_speech_to_text": {"codec_config.upsample_groups": 32},
    "lightglue": {"keypoint_detector_config": DEFAULT, "descriptor_dim": 256, "hidden_size": 256},
    "mistral4": {"head_dim": 16},
    "mllama": {"vision_config.intermediate_layers_indices": [0, 1], "vision_config.vision_output_dim": 96},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32},
    "neomme": {"rope_parameters.full_attention.partial_rotary_factor": 0.5},
    "nllb_moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 2, "router_jitter_noise": 0.0},
    "neucodec": {"quantization_dim": 64, "initializer_range": 0.5},
    "olmo_hybrid": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
    "paddleocr_vl": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "patchtsmixer": {"self_attn": True},
    "pe_audio_video": {f"audio_video_config.video_config.{key}": x for key, x in _PE.items()},
    "pe_video": {f"video_config.{key}": x for key, x in _PE.items()},
    "pp_doclayout_v2": _DETECTOR,
    "pp_doclayout_v3": _DETECTOR | {"x4_feat_dim": 16},
    "pp_doclayout_v4": _DETECTOR,
    "pp_ocrv5_mobile_rec": {CLASS: "PPOCRV5MobileRecForTextRecognition"},
    "pp_ocrv5_server_rec": _HGNET | {CLASS: "PPOCRV5ServerRecForTextRecognition"},
    "pp_ocrv6_small_rec": {CLASS: "PPOCRV6SmallRecForTextRecognition"},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "sam": _SAM,
    "sam2": _HIERA,
    "sam2_video": _HIERA,
    "sam_hq": _SAM,
    "sapiens2": {"num_key_value_heads_per_layer": [4, 4]},
    "time_series_transformer": _SERIES,
    "timesfm": {CLASS: "TimesFmModelForPrediction"},
    "vjepa2": {"crop_size": 64, "frames_per_clip": 8},
    "xcodec2": {"quantization_dim": 64, "initializer_range": 0.5},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "kv_channels": 8,
        "num_query_groups": 4,
        "adapter_rank": 8,
        "mamba_headdim": 8,
    },
}

TIMM_MORE = (
    "botnet26t_256",
    "coatnet_nano_rw_224",
    "fastvit_sa12",
    "lambda_resnet26t",
    "mobilenetv4_hybrid_medium",
    "vit_dlittle_patch16_reg1_gap_256",
)
"""Models of timm with attention in families whose smallest has none, or another kind of it."""

TIMM_ARGUMENTS: dict[str, dict[str, Any]] = {"convit_tiny": {"local_up_to_layer": 1}}
"""What some of timm's models take beside a depth of two: ConViT has plain attention in its last layers."""

TIMM_SIZES = {"mobilenetv5_300m": (3, 64, 64)}
"""Sizes of images, channels first, for models that are large and have no smaller sister."""
