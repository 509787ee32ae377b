"""FLUX.1 dev: double and single blocks, guidance as an input of the model."""

from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from usp.demo.tiny import encoders
from usp.demo.tiny.vaes import kl_vae
from usp.demo.tiny.words import clip_tokenizer, t5_tokenizer

CHANNELS = 4
CALL = {
    "height": 80,
    "width": 112,
    "num_inference_steps": 3,
    "guidance_scale": 3.5,
    "max_sequence_length": 48,
}
CALL |= {"true_cfg_scale": 2.0}


def text_to_image() -> FluxPipeline:
    """FLUX.1 dev; a negative prompt with `true_cfg_scale` above 1 adds a second branch."""
    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=4 * CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=encoders.T5_DIM,
        pooled_projection_dim=encoders.CLIP_DIM,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=kl_vae(CHANNELS),
        text_encoder=encoders.clip_text(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=encoders.t5(len(tokenizer_2)),
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )
