"""Tiny Wan pipelines with random weights, made in memory from configs; every process gets the same weights.

Two layers, width 32 (4 heads of 8), text width 16 and 5 tokens long, patch 1 x 2 x 2, fp32. The VAE shrinks
by 4 in time and 8 in space as Wan's does, so a grid of f x r x c tokens is a clip of 4 (f - 1) + 1 frames of
16 r x 16 c pixels.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

CHANNELS, TEXT_DIM, TEXT_LENGTH, IMAGE_DIM = 4, 16, 5, 16
WORDS = ("<pad>", "</s>", "<unk>", "a", "red", "blue", "circle", "square", "moving", "left", "right")
STEPS = 3


def seeded(build: Callable[[], Any], seed: int) -> Any:
    """What `build` makes with random weights from `seed`; the caller's random state is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every vendor's devices too
        return build().eval()


def transformer(
    *,
    model: type[WanTransformer3DModel] = WanTransformer3DModel,
    heads: int = 4,
    seed: int = 1,
    **config: Any,
) -> Any:
    """A WanTransformer3DModel, or a subclass."""
    sizes = {
        "num_attention_heads": heads,
        "attention_head_dim": 8,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "text_dim": TEXT_DIM,
        "freq_dim": 16,
        "ffn_dim": 64,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return seeded(lambda: model(**{**sizes, **config}), seed)


def vae() -> AutoencoderKLWan:
    """An AutoencoderKLWan whose latents are neither centred nor of unit size."""
    config = {"dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "base_dim": 4, "z_dim": CHANNELS}
    spread = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.5, 1.0, 2.0]}
    return seeded(lambda: AutoencoderKLWan(**config, **spread), 2)


def text_encoder() -> UMT5EncoderModel:
    """A UMT5 encoder."""
    sizes = {
        "vocab_size": len(WORDS),
        "d_model": TEXT_DIM,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    }
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return seeded(lambda: UMT5EncoderModel(UMT5Config(**sizes, **ids, dropout_rate=0.0)), 3)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words that ends each text with `</s>`."""
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def image_encoder() -> CLIPVisionModel:
    """A CLIP vision model of 3 x 3 patches and a class token: 10 image tokens."""
    sizes = {
        "hidden_size": IMAGE_DIM,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return seeded(lambda: CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=24, patch_size=8)), 4)


def image_processor() -> Any:
    """CLIP's image processor on PIL; version 5 of transformers has it beside one that needs torchvision."""
    name = "CLIPImageProcessorPil" if hasattr(transformers, "CLIPImageProcessorPil") else "CLIPImageProcessor"
    edge = {"height": 24, "width": 24}
    return getattr(transformers, name)(size={"shortest_edge": 24}, crop_size=edge)


def parts() -> dict[str, Any]:
    """The components that all Wan pipelines share."""
    return {
        "tokenizer": tokenizer(),
        "text_encoder": text_encoder(),
        "vae": vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def t2v(**config: Any) -> WanPipeline:
    """Wan 2.1 text to video."""
    return WanPipeline(**parts(), transformer=transformer(**config))


def i2v() -> WanImageToVideoPipeline:
    """Wan 2.1 image to video: CLIP states through added K/V projections, the image's latents as channels."""
    model = transformer(in_channels=2 * CHANNELS + 4, image_dim=IMAGE_DIM, added_kv_proj_dim=32)
    encode = {"image_encoder": image_encoder(), "image_processor": image_processor()}
    return WanImageToVideoPipeline(**parts(), **encode, transformer=model)


def ti2v() -> WanPipeline:
    """Wan 2.2 5B from text: one timestep per token, all alike."""
    return WanPipeline(**parts(), transformer=transformer(), expand_timesteps=True)


def ti2v_image() -> WanImageToVideoPipeline:
    """Wan 2.2 5B from an image: one timestep per token, 0 in the first frame."""
    return WanImageToVideoPipeline(**parts(), transformer=transformer(), expand_timesteps=True)


def two_experts() -> WanPipeline:
    """Wan 2.2 14B: `transformer` for the first steps, `transformer_2` for the rest."""
    return WanPipeline(
        **parts(), transformer=transformer(), transformer_2=transformer(seed=5), boundary_ratio=0.5
    )


def two_experts_image() -> WanImageToVideoPipeline:
    """Wan 2.2 14B from an image: two experts, no image encoder."""
    models = [transformer(seed=seed, in_channels=2 * CHANNELS + 4) for seed in (1, 5)]
    return WanImageToVideoPipeline(
        **parts(), transformer=models[0], transformer_2=models[1], boundary_ratio=0.5
    )


def low_noise_only() -> WanPipeline:
    """Wan 2.2 14B without its high-noise expert; no timestep reaches the boundary."""
    return WanPipeline(**parts(), transformer=None, transformer_2=transformer(seed=5), boundary_ratio=1.5)


PIPELINES: dict[str, Callable[..., Any]] = {
    build.__name__: build
    for build in (t2v, i2v, ti2v, ti2v_image, two_experts, two_experts_image, low_noise_only)
}


def build(kind: str, **config: Any) -> Any:
    """A fresh pipeline of that kind, without a progress bar."""
    pipeline = PIPELINES[kind](**config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def grid(frames: int, rows: int, columns: int) -> dict[str, int]:
    """The call's arguments for a clip of frames x rows x columns tokens."""
    return {"height": 16 * rows, "width": 16 * columns, "num_frames": 4 * (frames - 1) + 1}


def picture() -> Image.Image:
    """A noisy image of 48 x 32 pixels."""
    pixels = torch.randint(0, 256, (32, 48, 3), generator=torch.Generator().manual_seed(6), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def call(kind: str, tokens: tuple[int, int, int] = (1, 3, 7), **changes: Any) -> dict[str, Any]:
    """The arguments of a call of that kind of pipeline that returns latents."""
    arguments = {
        "prompt": "red circle moving right",
        "negative_prompt": "blue square",
        "num_inference_steps": STEPS,
        "guidance_scale": 3.0,
        "max_sequence_length": TEXT_LENGTH,
        "output_type": "latent",
        **grid(*tokens),
    }
    if PIPELINES[kind].__annotations__["return"] is WanImageToVideoPipeline:
        arguments["image"] = picture()
    if kind == "i2v":
        arguments["max_sequence_length"] = 512  # diffusers' processor takes the last 512 states as the text's
    return {**arguments, **changes}


def model_inputs(
    tokens: tuple[int, int, int],
    *,
    batch: int = 1,
    channels: int = CHANNELS,
    text: int = TEXT_LENGTH,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Inputs of one forward of `transformer()`."""
    generator = torch.Generator().manual_seed(seed)
    frames, rows, columns = tokens
    return {
        "hidden_states": torch.randn(batch, channels, frames, 2 * rows, 2 * columns, generator=generator),
        "timestep": torch.linspace(900.0, 300.0, batch),
        "encoder_hidden_states": torch.randn(batch, text, TEXT_DIM, generator=generator),
    }
