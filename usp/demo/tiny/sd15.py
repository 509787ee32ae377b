"""Stable Diffusion 1.5: a UNet, so a sequence of no fixed length; guidance branches in one batch."""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from diffusers import PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

from usp.demo.tiny import encoders
from usp.demo.tiny.vaes import kl_vae
from usp.demo.tiny.words import clip_tokenizer

CHANNELS = 4
CALL = {"height": 80, "width": 112, "num_inference_steps": 3, "guidance_scale": 7.5}


def text_to_image() -> StableDiffusionPipeline:
    """SD 1.5 without its safety checker: two levels of a UNet, cross-attention to CLIP's text."""
    tokenizer = clip_tokenizer()
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=encoders.CLIP_DIM,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    scheduler = PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )
    absent: dict = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return StableDiffusionPipeline(
        vae=kl_vae(CHANNELS, shift=None),
        text_encoder=encoders.clip_text(tokenizer),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        **absent,
    )
