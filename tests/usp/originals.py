"""Tiny pipelines, and their weights as the models' authors publish them: diffusers' conversion, backwards."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModel

from tests import tiny
from usp import original_keys, original_layouts

State = dict[str, torch.Tensor]
IMAGE_DIM = 80  # one head of ViT-H/14's width

# (what is in diffusers' key, what Wan calls it), tried in order on the whole key
WAN = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
    ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
    ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
    ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    (".to_out.0.", ".o."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    (".add_k_proj.", ".k_img."),
    (".add_v_proj.", ".v_img."),
    (".norm_added_k.", ".norm_k_img."),
    ("proj_out", "head.head"),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
)
RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
RESIDUAL |= {"conv_shortcut": "shortcut"}


def wan_keys(state: Mapping[str, torch.Tensor]) -> State:
    """A WanTransformer3DModel's state under Wan's keys."""
    found = {}
    for key, tensor in state.items():
        for name, original in WAN:
            key = key.replace(name, original)
        if re.fullmatch(r"blocks\.\d+\.norm[23]\..*", key):
            key = key.translate(str.maketrans("23", "32")) if "norm" in key else key
            key = re.sub(
                r"^blocks\.(\d+)", lambda m: "blocks." + m[1].translate(str.maketrans("23", "32")), key
            )
        if key.endswith("scale_shift_table"):
            key = key.replace(
                "scale_shift_table", "modulation" if key.startswith("blocks") else "head.modulation"
            )
        found[key] = tensor
    return found


def wan_config(model: Any, kind: str) -> dict[str, Any]:
    """Wan's config.json for a WanTransformer3DModel."""
    c = model.config
    return {
        "_class_name": "WanModel",
        "model_type": kind,
        "dim": c.num_attention_heads * c.attention_head_dim,
        "ffn_dim": c.ffn_dim,
        "freq_dim": c.freq_dim,
        "in_dim": c.in_channels,
        "out_dim": c.out_channels,
        "num_heads": c.num_attention_heads,
        "num_layers": c.num_layers,
        "eps": c.eps,
        "text_len": 512,
    }


def t5_keys(state: Mapping[str, torch.Tensor]) -> State:
    """A UMT5EncoderModel's state under Wan's keys."""
    names = {
        "0.layer_norm": "norm1",
        "0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
        "1.layer_norm": "norm2",
        "1.DenseReluDense.wi_0": "ffn.gate.0",
        "1.DenseReluDense.wi_1": "ffn.fc1",
        "1.DenseReluDense.wo": "ffn.fc2",
    } | {f"0.SelfAttention.{x}": f"attn.{x}" for x in "qkvo"}
    found = {
        "token_embedding.weight": state["shared.weight"],
        "norm.weight": state["encoder.final_layer_norm.weight"],
    }
    for key, tensor in state.items():
        if match := re.fullmatch(r"encoder\.block\.(\d+)\.layer\.(.+)\.weight", key):
            found[f"blocks.{match[1]}.{names[match[2]]}.weight"] = tensor
    return found


def clip_keys(state: Mapping[str, torch.Tensor], seed: int = 0) -> State:
    """A CLIPVisionModel's state as the vision tower of Wan's CLIP, which has a text tower too."""
    state = {key.removeprefix("vision_model."): value for key, value in state.items()}
    width = len(state["embeddings.class_embedding"])
    found = {
        "visual.cls_embedding": state["embeddings.class_embedding"][None, None],
        "visual.pos_embedding": state["embeddings.position_embedding.weight"][None],
        "visual.patch_embedding.weight": state["embeddings.patch_embedding.weight"],
        "visual.head": torch.zeros(width, 24),
        "textual.token_embedding.weight": torch.zeros(3, 4),
        "log_scale": torch.tensor(2.0),
    }
    names = {"layer_norm1": "norm1", "layer_norm2": "norm2", "self_attn.out_proj": "attn.proj"}
    names |= {"mlp.fc1": "mlp.0", "mlp.fc2": "mlp.2"}
    for kind in ("weight", "bias"):
        found[f"visual.pre_norm.{kind}"] = state[f"pre_layrnorm.{kind}"]
        found[f"visual.post_norm.{kind}"] = state[f"post_layernorm.{kind}"]
        layers = 1 + max(int(m[1]) for key in state if (m := re.match(r"encoder\.layers\.(\d+)", key)))
        for i in range(layers):
            layer, block = f"encoder.layers.{i}", f"visual.transformer.{i}"
            parts = [state[f"{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv"]
            found[f"{block}.attn.to_qkv.{kind}"] = torch.cat(parts)
            for name, original in names.items():
                found[f"{block}.{original}.{kind}"] = state[f"{layer}.{name}.{kind}"]
    return found


def vae_keys(state: Mapping[str, torch.Tensor], version: str) -> State:
    """An AutoencoderKLWan's state under the keys of Wan 2.1's or 2.2's VAE."""
    return {_vae_key(key, version): tensor for key, tensor in state.items()}


def _vae_key(key: str, version: str) -> str:
    if key.startswith(("quant_conv.", "post_quant_conv.")):
        return key.replace("post_quant_conv", "conv2").replace("quant_conv", "conv1")
    side, _, rest = key.partition(".")
    rest = rest.replace("conv_in.", "conv1.").replace("norm_out.", "head.0.").replace("conv_out.", "head.2.")
    if match := re.fullmatch(r"mid_block\.resnets\.(\d)\.(\w+)\.(\w+)", rest):
        return f"{side}.middle.{2 * int(match[1])}.{RESIDUAL[match[2]]}.{match[3]}"
    rest = rest.replace("mid_block.attentions.0.", "middle.1.")
    way = "downsamples" if side == "encoder" else "upsamples"
    if version == "2.2":
        if match := re.fullmatch(r"\w+_blocks\.(\d)\.resnets\.(\d)\.(\w+)\.(\w+)", rest):
            return f"{side}.{way}.{match[1]}.{way}.{match[2]}.{RESIDUAL[match[3]]}.{match[4]}"
        last = 2 if side == "encoder" else 3  # the resampling comes after 2 residual blocks, or 3
        return f"{side}." + re.sub(r"\w+_blocks\.(\d)\.\w+sampler\.", rf"{way}.\1.{way}.{last}.", rest)
    if match := re.fullmatch(r"up_blocks\.(\d)\.(?:resnets\.(\d)|upsamplers\.0)\.(.+)", rest):
        part, _, tail = match[3].partition(".")
        index = 4 * int(match[1]) + (3 if match[2] is None else int(match[2]))
        return f"{side}.{way}.{index}.{RESIDUAL.get(part, part)}.{tail}"
    if match := re.fullmatch(r"down_blocks\.(\d+)\.(\w+)\.(.+)", rest):
        return f"{side}.{way}.{match[1]}.{RESIDUAL.get(match[2], match[2])}.{match[3]}"
    return f"{side}.{rest}"


def flux_keys(state: Mapping[str, torch.Tensor]) -> State:
    """A FluxTransformer2DModel's state under FLUX.1's keys."""
    found, state = {}, dict(state)
    outer = {"time_text_embed.timestep_embedder": "time_in", "time_text_embed.text_embedder": "vector_in"}
    outer |= {"time_text_embed.guidance_embedder": "guidance_in"}
    for name, original in outer.items():
        for i, layer in (("1", "in_layer"), ("2", "out_layer")):
            for kind in ("weight", "bias"):
                found[f"{original}.{layer}.{kind}"] = state.pop(f"{name}.linear_{i}.{kind}")
    for kind in ("weight", "bias"):
        found[f"txt_in.{kind}"] = state.pop(f"context_embedder.{kind}")
        found[f"img_in.{kind}"] = state.pop(f"x_embedder.{kind}")
        found[f"final_layer.linear.{kind}"] = state.pop(f"proj_out.{kind}")
        scale, shift = state.pop(f"norm_out.linear.{kind}").chunk(2)
        found[f"final_layer.adaLN_modulation.1.{kind}"] = torch.cat([shift, scale])
    for key in [k for k in state if k.endswith(("attn.to_q.weight", "attn.to_q.bias"))]:
        block, kind = key.split(".attn.")[0], key.rsplit(".", 1)[1]
        double = block.startswith("transformer_blocks")
        number = block.split(".")[1]
        qkv = [state.pop(f"{block}.attn.to_{x}.{kind}") for x in "qkv"]
        if double:
            found[f"double_blocks.{number}.img_attn.qkv.{kind}"] = torch.cat(qkv)
            added = [state.pop(f"{block}.attn.add_{x}_proj.{kind}") for x in "qkv"]
            found[f"double_blocks.{number}.txt_attn.qkv.{kind}"] = torch.cat(added)
        else:
            mlp = state.pop(f"{block}.proj_mlp.{kind}")
            found[f"single_blocks.{number}.linear1.{kind}"] = torch.cat([*qkv, mlp])
    names = {
        "norm1.linear": "img_mod.lin",
        "norm1_context.linear": "txt_mod.lin",
        "attn.to_out.0": "img_attn.proj",
        "attn.to_add_out": "txt_attn.proj",
        "ff.net.0.proj": "img_mlp.0",
        "ff.net.2": "img_mlp.2",
        "ff_context.net.0.proj": "txt_mlp.0",
        "ff_context.net.2": "txt_mlp.2",
        "norm.linear": "modulation.lin",
        "proj_out": "linear2",
    }
    norms = {"norm_q": "img_attn.norm.query_norm", "norm_k": "img_attn.norm.key_norm"}
    norms |= {"norm_added_q": "txt_attn.norm.query_norm", "norm_added_k": "txt_attn.norm.key_norm"}
    for key, tensor in state.items():
        stack, number, rest = key.split(".", 2)
        name, kind = rest.rsplit(".", 1)
        double = stack == "transformer_blocks"
        if name.startswith("attn.norm_"):
            original = norms[name.removeprefix("attn.")] + ".scale"
            original = original if double else original.removeprefix("img_attn.")
        else:
            original = f"{names[name]}.{kind}"
        found[f"{'double' if double else 'single'}_blocks.{number}.{original}"] = tensor
    return found


def vae(version: str) -> AutoencoderKLWan:
    """A tiny VAE with all the blocks of Wan 2.1's or 2.2's, and its latent channels."""
    if version == "2.1":
        return tiny.seeded(lambda: AutoencoderKLWan(base_dim=4, z_dim=16), 2)
    sizes = {"base_dim": 4, "decoder_base_dim": 4, "z_dim": 48, "in_channels": 12, "out_channels": 12}
    spread = {
        "latents_mean": [float(x) for x in original_keys.LATENTS_MEAN_22.split()],
        "latents_std": [float(x) for x in original_keys.LATENTS_STD_22.split()],
    }
    shape = {"is_residual": True, "patch_size": 2, "scale_factor_spatial": 16}
    return tiny.seeded(lambda: AutoencoderKLWan(**sizes, **spread, **shape), 2)


def image_encoder() -> CLIPVisionModel:
    """A tiny CLIP as Wan's is: heads of 80, GELU."""
    sizes = {
        "hidden_size": IMAGE_DIM,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
    }
    config = CLIPVisionConfig(**sizes, image_size=24, patch_size=8, hidden_act="gelu", projection_dim=24)
    return tiny.seeded(lambda: CLIPVisionModel(config), 4)


def pipeline(kind: str, *, experts: int = 1) -> Any:
    """The diffusers pipeline of a tiny Wan model, as its converted folder would hold it."""
    version = "2.2" if kind == "ti2v" else "2.1"
    channels = 48 if kind == "ti2v" else 16
    sizes: dict[str, Any] = {"in_channels": channels, "out_channels": channels}
    made: dict[str, Any] = {**tiny.parts(), "vae": vae(version)}
    if kind == "i2v":
        sizes["in_channels"] = 36
    if kind == "i2v" and experts == 1:
        sizes |= {"image_dim": IMAGE_DIM, "added_kv_proj_dim": 32}
        made |= {"image_encoder": image_encoder(), "image_processor": tiny.image_processor()}
    names = ("transformer", "transformer_2")[:experts]
    made |= {name: tiny.transformer(seed=seed, **sizes) for name, seed in zip(names, (1, 5), strict=False)}
    made["scheduler"] = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0 if kind == "ti2v" else 3.0
    )
    if experts == 2:
        made["boundary_ratio"] = 0.9 if kind == "i2v" else 0.875
    if kind == "ti2v":
        made["expand_timesteps"] = True
    pipe = WanImageToVideoPipeline(**made) if kind == "i2v" else WanPipeline(**made)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def write_original(pipe: Any, kind: str, folder: Path) -> Path:
    """The folder that Wan's authors would publish for this pipeline; a single transformer in two shards."""
    two = pipe.transformer_2 is not None
    for name, sub in original_layouts.EXPERTS.items() if two else (("transformer", "."),):
        model = getattr(pipe, name)
        write_shards(wan_keys(model.state_dict()), folder / sub, shards=1 if two else 2)
        (folder / sub / "config.json").write_text(json.dumps(wan_config(model, kind)))
    version = "2.2" if kind == "ti2v" else "2.1"
    torch.save(vae_keys(pipe.vae.state_dict(), version), folder / original_layouts.VAE_FILES[version])
    torch.save(t5_keys(pipe.text_encoder.state_dict()), folder / original_layouts.T5_FILE)
    if getattr(pipe, "image_encoder", None) is not None:
        torch.save(clip_keys(pipe.image_encoder.state_dict()), folder / original_layouts.CLIP_FILE)
    pipe.tokenizer.save_pretrained(folder / original_layouts.TOKENIZER)
    return folder


def write_shards(state: State, folder: Path, *, shards: int) -> None:
    """safetensors of this state in one file, or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(
            {k: v.contiguous() for k, v in state.items()}, folder / "diffusion_pytorch_model.safetensors"
        )
        return
    names = [f"diffusion_pytorch_model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    keys = list(state)
    weight_map = {key: names[i * shards // len(keys)] for i, key in enumerate(keys)}
    for name in names:
        held = {k: state[k].contiguous() for k in keys if weight_map[k] == name}
        save_file(held, folder / name)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
