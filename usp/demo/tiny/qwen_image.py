"""Qwen-Image and its edit models: text and images together through Qwen2.5-VL, one joint attention."""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from typing import Any

import transformers
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLProcessor,
)
from transformers.utils import is_torchvision_available

from usp.demo.tiny.words import qwen_tokenizer
from usp.processors import qwen_processor_class

CHANNELS, TEXT_DIM = 4, 16
MOST_IMAGE_TOKENS = 12  # that the text encoder sees of one image
# The edit pipelines bring every image to 1024 x 1024 pixels; a VAE that shrinks by 64 makes 8 x 8 tokens.
LEVELS, EDIT_LEVELS = 3, 6
CALL = {"height": 80, "width": 112, "num_inference_steps": 3, "true_cfg_scale": 4.0}
EDIT_CALL = {**CALL, "height": 384, "width": 640}


def _text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    special = {
        name: tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image_token_id", "image_pad"),
            ("video_token_id", "video_pad"),
            ("vision_start_token_id", "vision_start"),
            ("vision_end_token_id", "vision_end"),
        )
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_DIM,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": TEXT_DIM,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special, tie_word_embeddings=False)
    )


def _image_processor() -> Any:
    name = "Qwen2VLImageProcessorPil"  # transformers 5 has it beside one that needs torchvision
    kind = getattr(transformers, name if hasattr(transformers, name) else "Qwen2VLImageProcessor")
    return kind(min_pixels=28 * 28, max_pixels=28 * 28 * MOST_IMAGE_TOKENS)


def _vae(levels: int) -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=2,
        z_dim=CHANNELS,
        dim_mult=[1] + [2] * levels,
        num_res_blocks=1,
        temperal_downsample=[False, True, True][:levels] + [False] * (levels - 3),
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.5, 1.0, 2.0],
    )


def _parts(*, levels: int, zero_cond_t: bool = False) -> dict[str, Any]:
    tokenizer = qwen_tokenizer()
    transformer = QwenImageTransformer2DModel(
        in_channels=4 * CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    return {
        "scheduler": scheduler,
        "vae": _vae(levels),
        "text_encoder": _text_encoder(tokenizer),
        "tokenizer": tokenizer,
        "transformer": transformer,
    }


def _processor() -> Qwen2VLProcessor:
    kind = qwen_processor_class()
    parts: dict[str, Any] = {"image_processor": _image_processor(), "tokenizer": qwen_tokenizer()}
    if is_torchvision_available():
        parts["video_processor"] = transformers.Qwen2VLVideoProcessor()
    return kind(**parts)


def text_to_image() -> QwenImagePipeline:
    """Qwen-Image, with 3 heads."""
    return QwenImagePipeline(**_parts(levels=LEVELS))


def edit() -> QwenImageEditPipeline:
    """Qwen-Image-Edit: one image in."""
    return QwenImageEditPipeline(**_parts(levels=EDIT_LEVELS), processor=_processor())


def edit_plus() -> QwenImageEditPlusPipeline:
    """Qwen-Image-Edit-2511: several images in, whose tokens are modulated as at time 0 (`zero_cond_t`)."""
    return QwenImageEditPlusPipeline(**_parts(levels=EDIT_LEVELS, zero_cond_t=True), processor=_processor())
