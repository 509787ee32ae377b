"""Text and image encoders of the real classes, one to three layers and 16 to 32 wide."""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from typing import Any

import transformers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from usp.demo.tiny.words import CLIP_LENGTH

T5_DIM, CLIP_DIM, IMAGE_DIM = 32, 16, 16
T5_SIZES = {
    "d_model": T5_DIM,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def t5(words: int) -> T5EncoderModel:
    """A T5 encoder for a vocabulary of so many words."""
    return T5EncoderModel(T5Config(vocab_size=words, **T5_SIZES))


def umt5(words: int) -> UMT5EncoderModel:
    """A UMT5 encoder for a vocabulary of so many words."""
    return UMT5EncoderModel(UMT5Config(vocab_size=words, **T5_SIZES))


def clip_text(tokenizer: CLIPTokenizer, *, width: int = CLIP_DIM, projected: bool = False) -> Any:
    """A CLIP text model for this tokenizer; `projected` gives the class with a projection, as wide."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def qwen3(tokenizer: Qwen2Tokenizer, *, width: int, layers: int, head: bool = False) -> Any:
    """A Qwen3 model for this tokenizer, with a head for words or without; two heads share a key and value."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=width // 2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return (Qwen3ForCausalLM if head else Qwen3Model)(config)


def clip_vision() -> CLIPVisionModel:
    """A CLIP vision model of 4 x 4 patches and a class token: 17 image tokens, where the real one has 257."""
    return CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=IMAGE_DIM,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
        )
    )


def clip_image_processor() -> Any:
    """CLIP's image processor on PIL; transformers 5 has it beside one that needs torchvision."""
    name = "CLIPImageProcessorPil" if hasattr(transformers, "CLIPImageProcessorPil") else "CLIPImageProcessor"
    return getattr(transformers, name)(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
