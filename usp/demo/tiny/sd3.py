"""Stable Diffusion 3.5 medium: three text encoders, joint blocks, some with a second self-attention."""

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from usp.demo.tiny import encoders
from usp.demo.tiny.vaes import kl_vae
from usp.demo.tiny.words import clip_tokenizer, t5_tokenizer

CHANNELS = 4
CALL = {
    "height": 80,
    "width": 112,
    "num_inference_steps": 3,
    "guidance_scale": 4.5,
    "max_sequence_length": 32,
}


def text_to_image() -> StableDiffusion3Pipeline:
    """SD 3.5 medium: guidance branches in one batch, three layers, the first two with dual attention."""
    tokenizer, tokenizer_2, tokenizer_3 = clip_tokenizer(), clip_tokenizer(pad="!"), t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=encoders.T5_DIM,
        caption_projection_dim=32,
        pooled_projection_dim=2 * encoders.CLIP_DIM,
        pos_embed_max_size=24,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=kl_vae(CHANNELS),
        text_encoder=encoders.clip_text(tokenizer, projected=True),
        tokenizer=tokenizer,
        text_encoder_2=encoders.clip_text(tokenizer_2, projected=True),
        tokenizer_2=tokenizer_2,
        text_encoder_3=encoders.t5(len(tokenizer_3)),
        tokenizer_3=tokenizer_3,
    )
