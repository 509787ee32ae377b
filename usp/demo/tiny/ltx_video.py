"""LTX-Video: one token per latent pixel of a VAE that shrinks by 32; cross-attention to masked T5 text."""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)

from usp.demo.tiny import encoders
from usp.demo.tiny.words import t5_tokenizer

CHANNELS, HEADS, HEAD_DIM = 4, 4, 8
CALL = {"height": 96, "width": 160, "num_frames": 17, "num_inference_steps": 3, "guidance_scale": 3.0}
CALL |= {"max_sequence_length": 32}


def text_to_video() -> LTXPipeline:
    """LTX-Video, text to video; branches in one batch."""
    tokenizer = t5_tokenizer()
    transformer = LTXVideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=HEADS * HEAD_DIM,
        num_layers=2,
        caption_channels=encoders.T5_DIM,
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        vae=vae,
        text_encoder=encoders.t5(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
    )
