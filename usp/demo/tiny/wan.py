"""Wan 2.1 and 2.2: text, image and control to video; one or two experts; per-token timesteps."""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from typing import Any

from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from PIL import Image

from usp.demo.tiny import encoders
from usp.demo.tiny.pictures import picture
from usp.demo.tiny.words import t5_tokenizer

CHANNELS = 4
WITH_IMAGE = 2 * CHANNELS + 4  # noise, the image's latents, and a mask of 4 frames to a latent
VACE_CHANNELS = 2 * CHANNELS + 64  # latents of what changes and what stays, and an 8 x 8 mask to a latent
SIZES = {
    "attention_head_dim": 8,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "text_dim": encoders.T5_DIM,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
CALL = {"height": 48, "width": 80, "num_frames": 9, "num_inference_steps": 3, "guidance_scale": 4.0}
CALL |= {"max_sequence_length": 32}
IMAGE_CALL = {**CALL, "max_sequence_length": 512}  # diffusers takes the last 512 states as the text's


def _transformer(heads: int = 4, **config: Any) -> WanTransformer3DModel:
    return WanTransformer3DModel(num_attention_heads=heads, **{**SIZES, **config})


def _vae() -> AutoencoderKLWan:
    """Shrinks by 4 in time and 8 in space; latents neither centred nor of unit size."""
    return AutoencoderKLWan(
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        base_dim=4,
        z_dim=CHANNELS,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.5, 1.0, 2.0],
    )


def _parts() -> dict[str, Any]:
    tokenizer = t5_tokenizer()
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    text_encoder = encoders.umt5(len(tokenizer))
    return {"tokenizer": tokenizer, "text_encoder": text_encoder, "vae": _vae(), "scheduler": scheduler}


def t2v() -> WanPipeline:
    """Wan 2.1 text to video, with 5 heads."""
    return WanPipeline(**_parts(), transformer=_transformer(heads=5))


def t2v_2_2() -> WanPipeline:
    """Wan 2.2 14B: `transformer` for the noisy steps, `transformer_2` for the rest."""
    return WanPipeline(
        **_parts(), transformer=_transformer(), transformer_2=_transformer(), boundary_ratio=0.875
    )


def i2v() -> WanImageToVideoPipeline:
    """Wan 2.1 image to video: CLIP states through added K/V projections, the image's latents as channels."""
    transformer = _transformer(
        in_channels=WITH_IMAGE,
        image_dim=encoders.IMAGE_DIM,
        added_kv_proj_dim=4 * SIZES["attention_head_dim"],
    )
    vision: dict[str, Any] = {
        "image_encoder": encoders.clip_vision(),
        "image_processor": encoders.clip_image_processor(),
    }
    return WanImageToVideoPipeline(**_parts(), **vision, transformer=transformer)


def i2v_2_2() -> WanImageToVideoPipeline:
    """Wan 2.2 14B from an image: two experts, no image encoder."""
    experts = {name: _transformer(in_channels=WITH_IMAGE) for name in ("transformer", "transformer_2")}
    return WanImageToVideoPipeline(**_parts(), **experts, boundary_ratio=0.9)


def ti2v() -> WanPipeline:
    """Wan 2.2 5B: one timestep per token."""
    return WanPipeline(**_parts(), transformer=_transformer(), expand_timesteps=True)


def vace() -> WanVACEPipeline:
    """Wan 2.1 VACE: a second stack of blocks reads the control video, its hints join every block."""
    config = {**SIZES, "vace_layers": [0, 1], "vace_in_channels": VACE_CHANNELS}
    transformer = WanVACETransformer3DModel(num_attention_heads=4, **config)
    return WanVACEPipeline(**_parts(), transformer=transformer)


def control_video() -> dict[str, Any]:
    """What VACE takes beside the prompt: a clip, what of it is to change (white), a picture to keep to."""
    frames = CALL["num_frames"]
    size = (CALL["width"], CALL["height"])
    half = Image.new("L", size, 0)
    half.paste(255, (0, 0, size[0] // 2, size[1]))
    clip = [picture(seed, size) for seed in range(frames)]
    return {"video": clip, "mask": [half] * frames, "reference_images": picture(frames)}
