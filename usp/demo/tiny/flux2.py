"""FLUX.2: one modulation for all blocks, positions of four axes; dev embeds guidance, klein has branches.

Both read the prompt from three inner layers of a language model, which therefore has as many layers here.
"""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from typing import Any

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from usp.demo.tiny import encoders
from usp.demo.tiny.words import mistral_tokenizer, qwen_tokenizer

CHANNELS, TEXT_DIM = 4, 16
KLEIN_LAYERS, DEV_LAYERS = 28, 31
CALL = {
    "height": 80,
    "width": 112,
    "num_inference_steps": 3,
    "guidance_scale": 4.0,
    "max_sequence_length": 64,
}


def _vae() -> AutoencoderKLFlux2:
    return AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=CHANNELS,
    )


def _parts(*, guidance: bool) -> dict[str, Any]:
    transformer = Flux2Transformer2DModel(
        in_channels=4 * CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=3 * TEXT_DIM,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return {"scheduler": scheduler, "vae": _vae(), "transformer": transformer}


def klein() -> Flux2KleinPipeline:
    """FLUX.2 klein base: Qwen3 reads the prompt, the empty prompt is the second branch."""
    tokenizer = qwen_tokenizer()
    text_encoder = encoders.qwen3(tokenizer, width=TEXT_DIM, layers=KLEIN_LAYERS, head=True)
    return Flux2KleinPipeline(**_parts(guidance=False), text_encoder=text_encoder, tokenizer=tokenizer)


def dev() -> Flux2Pipeline:
    """FLUX.2 dev: Mistral 3 reads the prompt; guidance is an input of the model.

    Its tokenizer is the one inside the real model's processor, which needs torchvision for images.
    """
    tokenizer = mistral_tokenizer()
    text = {
        "model_type": "mistral",
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_DIM,
        "intermediate_size": 32,
        "num_hidden_layers": DEV_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 56,
    }
    config = Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=tokenizer.convert_tokens_to_ids("[IMG]")
    )
    text_encoder = Mistral3ForConditionalGeneration(config)
    return Flux2Pipeline(**_parts(guidance=True), text_encoder=text_encoder, tokenizer=tokenizer)
