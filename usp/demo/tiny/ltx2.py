"""LTX-2: video and sound in two streams that attend to each other; text from all layers of Gemma 3."""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast

from usp.demo.tiny.words import gemma_tokenizer

CHANNELS, HEADS, HEAD_DIM, TEXT_DIM, TEXT_LAYERS, MEL_BINS = 4, 4, 8, 16, 2, 8
CALL = {"height": 96, "width": 160, "num_frames": 17, "num_inference_steps": 3, "guidance_scale": 3.0}
CALL |= {"max_sequence_length": 32, "spatio_temporal_guidance_blocks": [1]}


def _text_encoder(tokenizer: PreTrainedTokenizerFast) -> Gemma3ForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_DIM,
        "intermediate_size": 32,
        "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    special = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image_token_index", "<image_soft_token>"),
            ("boi_token_index", "<start_of_image>"),
            ("eoi_token_index", "<end_of_image>"),
        )
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **special)
    return Gemma3ForConditionalGeneration(config)


def _transformer() -> LTX2VideoTransformer3DModel:
    audio = 2 * MEL_BINS // 4  # channels of the sound's latents times their mel bins
    return LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=HEADS * HEAD_DIM,
        audio_in_channels=audio,
        audio_out_channels=audio,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=4 * HEADS,
        num_layers=2,
        caption_channels=TEXT_DIM,
        rope_double_precision=False,
    )


def text_to_video() -> LTX2Pipeline:
    """LTX-2, text to video with sound: guidance, a perturbed and an isolated branch."""
    tokenizer = gemma_tokenizer()
    connectors = LTX2TextConnectors(
        caption_channels=TEXT_DIM,
        text_proj_in_factor=TEXT_LAYERS + 1,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        rope_double_precision=False,
    )
    vae = AutoencoderKLLTX2Video(
        latent_channels=CHANNELS,
        block_out_channels=(4, 8, 16, 32),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        mel_bins=MEL_BINS,
    )
    vocoder = LTX2Vocoder(
        in_channels=2 * MEL_BINS,
        hidden_channels=16,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )
    return LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=_text_encoder(tokenizer),
        tokenizer=tokenizer,
        connectors=connectors,
        transformer=_transformer(),
        vocoder=vocoder,
    )
