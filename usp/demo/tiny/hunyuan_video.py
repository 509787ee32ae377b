"""HunyuanVideo: Llama and CLIP text, refined; double and single blocks over video and text with a mask."""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from transformers import LlamaConfig, LlamaModel

from usp.demo.tiny import encoders
from usp.demo.tiny.words import clip_tokenizer, llama_tokenizer

CHANNELS, TEXT_DIM = 4, 16
CALL = {"height": 48, "width": 80, "num_frames": 9, "num_inference_steps": 3, "max_sequence_length": 32}
CALL |= {"guidance_scale": 6.0, "true_cfg_scale": 3.0}


def text_to_video() -> HunyuanVideoPipeline:
    """HunyuanVideo: embedded guidance; a negative prompt with `true_cfg_scale` above 1 adds a branch."""
    tokenizer, tokenizer_2 = llama_tokenizer(), clip_tokenizer()
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=32,
        num_hidden_layers=4,  # the pipeline reads the third from the end
        num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=TEXT_DIM,
        pooled_projection_dim=encoders.CLIP_DIM,
        rope_axes_dim=(2, 2, 4),
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=CHANNELS, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel(text),
        tokenizer=tokenizer,
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=encoders.clip_text(tokenizer_2),
        tokenizer_2=tokenizer_2,
    )
