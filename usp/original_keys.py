"""Keys and configs of those of Wan's own files for which no library has a converter: umT5, CLIP, the 2.2 VAE.

Source: wan/modules/t5.py, clip.py and vae2_2.py of github.com/Wan-Video/Wan2.2, and
scripts/convert_wan_to_diffusers.py of diffusers, which the package does not contain.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

Tensors = Mapping[str, torch.Tensor]
Rules = tuple[tuple[str, str], ...]

_BLOCK = r"encoder.block.\1.layer."
T5: Rules = (
    (r"token_embedding\.", "shared."),
    (r"norm\.", "encoder.final_layer_norm."),
    (r"blocks\.(\d+)\.norm1\.", _BLOCK + "0.layer_norm."),
    (r"blocks\.(\d+)\.attn\.([qkvo])\.", _BLOCK + r"0.SelfAttention.\2."),
    (r"blocks\.(\d+)\.pos_embedding\.embedding\.", _BLOCK + "0.SelfAttention.relative_attention_bias."),
    (r"blocks\.(\d+)\.norm2\.", _BLOCK + "1.layer_norm."),
    (r"blocks\.(\d+)\.ffn\.gate\.0\.", _BLOCK + "1.DenseReluDense.wi_0."),
    (r"blocks\.(\d+)\.ffn\.fc1\.", _BLOCK + "1.DenseReluDense.wi_1."),
    (r"blocks\.(\d+)\.ffn\.fc2\.", _BLOCK + "1.DenseReluDense.wo."),
)

_LAYER = r"encoder.layers.\1."
CLIP: Rules = (
    (r"cls_embedding", "embeddings.class_embedding"),
    (r"pos_embedding", "embeddings.position_embedding.weight"),
    (r"patch_embedding\.", "embeddings.patch_embedding."),
    (r"pre_norm\.", "pre_layrnorm."),  # transformers' spelling
    (r"post_norm\.", "post_layernorm."),
    (r"transformer\.(\d+)\.norm([12])\.", _LAYER + r"layer_norm\2."),
    (r"transformer\.(\d+)\.attn\.proj\.", _LAYER + "self_attn.out_proj."),
    (r"transformer\.(\d+)\.mlp\.0\.", _LAYER + "mlp.fc1."),
    (r"transformer\.(\d+)\.mlp\.2\.", _LAYER + "mlp.fc2."),
)
CLIP_QKV = re.compile(r"transformer\.(\d+)\.attn\.to_qkv\.(weight|bias)")
CLIP_HEAD_WIDTH = 80  # ViT-H/14: 1280 in 16 heads; no tensor tells

_UNIT = r"(encoder|decoder)\.(down|up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\."
_RESNET, _RESAMPLE = r"\1.\2_blocks.\3.resnets.\4.", r"\1.\2_blocks.\3.\2sampler."
VAE_22: Rules = (
    (_UNIT + r"residual\.0\.", _RESNET + "norm1."),
    (_UNIT + r"residual\.2\.", _RESNET + "conv1."),
    (_UNIT + r"residual\.3\.", _RESNET + "norm2."),
    (_UNIT + r"residual\.6\.", _RESNET + "conv2."),
    (_UNIT + r"shortcut\.", _RESNET + "conv_shortcut."),
    (_UNIT + r"(?=resample\.|time_conv\.)", _RESAMPLE),
)

# The mean and spread of the 48 latent channels of Wan2.2_VAE.pth; the file does not hold them.
LATENTS_MEAN_22 = """
    -0.2289 -0.0052 -0.1323 -0.2339 -0.2799 0.0174 0.1838 0.1557 -0.1382 0.0542 0.2813 0.0891 0.1570
    -0.0098 0.0375 -0.1825 -0.2246 -0.1207 -0.0698 0.5109 0.2665 -0.2108 -0.2158 0.2502 -0.2055
    -0.0322 0.1109 0.1567 -0.0729 0.0899 -0.2799 -0.1230 -0.0313 -0.1649 0.0117 0.0723 -0.2839
    -0.2083 -0.0520 0.3748 0.0152 0.1957 0.1433 -0.2944 0.3573 -0.0548 -0.1681 -0.0667
"""
LATENTS_STD_22 = """
    0.4765 1.0364 0.4514 1.1677 0.5313 0.4990 0.4818 0.5013 0.8158 1.0344 0.5894 1.0901 0.6885
    0.6165 0.8454 0.4978 0.5759 0.3523 0.7135 0.6804 0.5833 1.4146 0.8986 0.5659 0.7069 0.5338
    0.4889 0.4917 0.4069 0.4999 0.6866 0.4093 0.5709 0.6065 0.6415 0.4944 0.5726 1.2042 0.5458
    1.6887 0.3971 1.0600 0.3943 0.5537 0.5444 0.4089 0.7468 0.7744
"""


def t5_to_transformers(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Wan's umT5 encoder under the keys of UMT5EncoderModel."""
    return {_renamed(key, T5): tensor for key, tensor in tensors.items()}


def t5_config(tensors: Tensors) -> dict[str, Any]:
    """The UMT5Config that Wan's umT5 encoder fixes by its shapes. Raises KeyError for a missing key."""
    vocabulary, width = tensors["token_embedding.weight"].shape
    buckets, heads = tensors["blocks.0.pos_embedding.embedding.weight"].shape
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": tensors["blocks.0.attn.q.weight"].shape[0] // heads,
        "d_ff": tensors["blocks.0.ffn.fc1.weight"].shape[0],
        "num_layers": _count(tensors, r"blocks\.(\d+)\."),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu",
    }


def clip_to_transformers(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The vision tower of Wan's CLIP under CLIPVisionModel's keys; its text tower and head are not used."""
    found: dict[str, torch.Tensor] = {}
    for key, tensor in vision_tower(tensors).items():
        if match := CLIP_QKV.fullmatch(key):
            for name, part in zip("qkv", tensor.chunk(3), strict=True):
                found[f"encoder.layers.{match[1]}.self_attn.{name}_proj.{match[2]}"] = part
        elif key in ("cls_embedding", "pos_embedding"):
            found[_renamed(key, CLIP)] = tensor[0, 0] if key == "cls_embedding" else tensor[0]
        elif key != "head":
            found[_renamed(key, CLIP)] = tensor
    return found


def vision_tower(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of CLIP that see the image, under the names that they have inside the tower."""
    return {key.removeprefix("visual."): value for key, value in tensors.items() if key.startswith("visual.")}


def clip_config(tensors: Tensors) -> dict[str, Any]:
    """The CLIPVisionConfig of Wan's CLIP. Raises KeyError for a key that is missing."""
    tower = vision_tower(tensors)
    width, _, patch, _ = tower["patch_embedding.weight"].shape
    return {
        "hidden_size": width,
        "intermediate_size": tower["transformer.0.mlp.0.weight"].shape[0],
        "num_hidden_layers": _count(tower, r"transformer\.(\d+)\."),
        "num_attention_heads": width // CLIP_HEAD_WIDTH,
        "image_size": round((tower["pos_embedding"].shape[1] - 1) ** 0.5) * patch,
        "patch_size": patch,
        "projection_dim": tower["head"].shape[1],
        "hidden_act": "gelu",
    }


def vae_22_to_diffusers(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Wan 2.2's VAE under AutoencoderKLWan's keys; diffusers' converter knows all but the nested blocks."""
    nested = {key: value for key, value in tensors.items() if re.match(_UNIT, key)}
    rest = {key: value for key, value in tensors.items() if key not in nested}
    return {_renamed(key, VAE_22): value for key, value in nested.items()} | convert_wan_vae_to_diffusers(
        rest
    )


def vae_config(tensors: Tensors, *, version: str) -> dict[str, Any]:
    """The AutoencoderKLWan config of Wan's VAE, version "2.1" or "2.2". Raises KeyError for a missing key."""
    base, latent = tensors["encoder.conv1.weight"].shape[0], tensors["conv2.weight"].shape[0]
    if version == "2.1":
        return {"base_dim": base, "z_dim": latent}
    channels = tensors["encoder.conv1.weight"].shape[1]
    return {
        "base_dim": base,
        "decoder_base_dim": tensors["decoder.conv1.weight"].shape[0] // 4,
        "z_dim": latent,
        "is_residual": True,
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "scale_factor_temporal": 4,
        "latents_mean": [float(x) for x in LATENTS_MEAN_22.split()],
        "latents_std": [float(x) for x in LATENTS_STD_22.split()],
    }


def transformer_config(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The WanTransformer3DModel config of config.json and the shapes. Raises KeyError for a missing key."""
    image = tensors.get("img_emb.proj.0.weight")
    return {
        "patch_size": tuple(tensors["patch_embedding.weight"].shape[2:]),  # config.json leaves these two out
        "text_dim": tensors["text_embedding.0.weight"].shape[1],
        "num_attention_heads": config["num_heads"],
        "attention_head_dim": config["dim"] // config["num_heads"],
        "in_channels": config["in_dim"],
        "out_channels": config["out_dim"],
        "freq_dim": config["freq_dim"],
        "ffn_dim": config["ffn_dim"],
        "num_layers": config["num_layers"],
        "eps": config["eps"],
        "cross_attn_norm": "blocks.0.norm3.weight" in tensors,
        "qk_norm": "rms_norm_across_heads",
        "image_dim": None if image is None else image.shape[0],
        "added_kv_proj_dim": None if image is None else config["dim"],
    }


def _renamed(key: str, rules: Rules) -> str:
    """`key` as the first rule that fits its beginning has it, else as it is: then it is named as too many."""
    for pattern, name in rules:
        if match := re.match(pattern, key):
            return match.expand(name) + key[match.end() :]
    return key


def _count(tensors: Tensors, pattern: str) -> int:
    return 1 + max(int(match[1]) for key in tensors if (match := re.match(pattern, key)))
