"""CogVideoX 5B: text and video in one sequence, rotary positions for the video; branches in one batch."""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)

from usp.demo.tiny import encoders
from usp.demo.tiny.words import t5_tokenizer

CHANNELS, TEXT_LENGTH = 4, 32
CALL = {"height": 48, "width": 80, "num_frames": 9, "num_inference_steps": 3, "guidance_scale": 6.0}
CALL |= {"max_sequence_length": TEXT_LENGTH}


def text_to_video() -> CogVideoXPipeline:
    """CogVideoX 5B, text to video."""
    tokenizer = t5_tokenizer()
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        time_embed_dim=16,
        text_embed_dim=encoders.T5_DIM,
        num_layers=2,
        sample_width=10,
        sample_height=6,
        sample_frames=9,
        max_text_seq_length=TEXT_LENGTH,
        use_rotary_positional_embeddings=True,
    )
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
        sample_height=48,
        sample_width=80,
        scaling_factor=0.7,
    )
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        snr_shift_scale=1.0,
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )
    return CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=encoders.t5(len(tokenizer)),
        vae=vae,
        transformer=transformer,
        scheduler=scheduler,
    )
