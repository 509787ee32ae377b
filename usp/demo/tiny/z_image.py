"""Z-Image: lists of tensors in and out, refiner blocks for noise and text before the joint ones."""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

from usp.demo.tiny import encoders
from usp.demo.tiny.vaes import kl_vae
from usp.demo.tiny.words import qwen_tokenizer

CHANNELS, HEADS, HEAD_DIM, TEXT_DIM = 4, 6, 8, 16
CALL = {
    "height": 80,
    "width": 112,
    "num_inference_steps": 3,
    "guidance_scale": 5.0,
    "max_sequence_length": 64,
}


def text_to_image() -> ZImagePipeline:
    """Z-Image, with 6 heads for the real model's 30: both are no multiple of 4."""
    tokenizer = qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=CHANNELS,
        dim=HEADS * HEAD_DIM,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=TEXT_DIM,
        axes_dims=[4, 2, 2],
        axes_lens=[256, 32, 32],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=kl_vae(CHANNELS),
        text_encoder=encoders.qwen3(tokenizer, width=TEXT_DIM, layers=3),
        tokenizer=tokenizer,
        transformer=transformer,
    )
