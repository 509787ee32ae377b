"""Wan's original folders, as its authors publish them: known by their files, loaded as diffusers' models."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.loaders.single_file_utils import (
    convert_wan_transformer_to_diffusers,
    convert_wan_vae_to_diffusers,
)
from transformers import AutoTokenizer, CLIPVisionModel, UMT5EncoderModel

from runtime.checkpoint import open_checkpoint, resolve_files
from runtime.device import Device
from runtime.loading import LoadReport
from usp import original_keys as keys
from usp.parts import check_fits, empty_model, fill, read_keys

T5_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
CLIP_FILE = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
VAE_FILES = {"2.1": "Wan2.1_VAE.pth", "2.2": "Wan2.2_VAE.pth"}
TOKENIZER = "google/umt5-xxl"
EXPERTS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}
SHARDS = "diffusion_pytorch_model*.safetensors"

# config.json's model_type, and the pipelines that run it.
KINDS = {
    "t2v": ("WanPipeline", "WanVideoToVideoPipeline"),
    "i2v": ("WanImageToVideoPipeline",),
    "ti2v": ("WanPipeline", "WanImageToVideoPipeline"),
}
# As in diffusers' own copies of these models (scripts/convert_wan_to_diffusers.py).
FLOW_SHIFT = {"t2v": 3.0, "i2v": 3.0, "ti2v": 5.0}
BOUNDARY_RATIO = {"t2v": 0.875, "i2v": 0.9}
LATENT_CHANNELS = {"2.1": 16, "2.2": 48}  # of which the mean and spread are known

Opened = tuple[Any, Mapping[str, torch.Tensor]]  # a model without weights, and its tensors, unread


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An original Wan folder: its kind ("t2v", "i2v", "ti2v"), and where its parts are."""

    folder: Path
    kind: str
    transformers: Mapping[str, Path]  # component's name -> the folder of its shards
    vae_version: str
    has_clip: bool

    @property
    def name(self) -> str:
        """What it is, in words."""
        experts = ", two experts" if len(self.transformers) > 1 else ""
        return f"Wan's original {self.kind} model (VAE {self.vae_version}{experts})"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a list of file names shows: the transformers' folders (relative), which VAE, CLIP or not."""

    transformers: Mapping[str, str]
    vae_version: str
    has_clip: bool


def parts_of(names: Collection[str]) -> Parts | None:
    """The parts of the original Wan folder with these files (relative, with /), or None if it is none.

    Raises ValueError, with what was found and what is missing or too many, for one that is not whole.
    """
    names = set(names)
    shards = {
        folder: sorted(n for n in names if Path(n).parent == Path(folder or ".") and Path(n).match(SHARDS))
        for folder in ("", *EXPERTS.values())
    }
    singles = [n for n in (T5_FILE, CLIP_FILE, *VAE_FILES.values()) if n in names]
    found = [f"{folder or '.'}/{SHARDS}" for folder, files in shards.items() if files] + singles
    if "model_index.json" in names or not found:
        return None
    two = any(shards[folder] for folder in EXPERTS.values())
    transformers = EXPERTS if two else {"transformer": ""}
    missing = [f"{f or '.'}/{SHARDS}" for f in transformers.values() if not shards[f]]
    configs = (f"{folder}/config.json".lstrip("/") for folder in transformers.values())
    missing += [n for n in (*configs, T5_FILE, f"{TOKENIZER}/tokenizer.json") if n not in names]
    vaes = [version for version, file in VAE_FILES.items() if file in names]
    if not vaes:
        missing.append(" or ".join(VAE_FILES.values()))
    if missing:
        raise ValueError(
            f"this looks like Wan's original layout (found: {', '.join(found)}), but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; download the whole model, or give a diffusers "
            f"folder, which has model_index.json"
        )
    if len(vaes) > 1 or (two and shards[""]):
        both = list(VAE_FILES.values()) if len(vaes) > 1 else [f"./{SHARDS}", *EXPERTS.values()]
        raise ValueError(
            f"this looks like two Wan models in one folder: {' and '.join(both)}; keep one of them"
        )
    return Parts(transformers=transformers, vae_version=vaes[0], has_clip=CLIP_FILE in names)


def detect(folder: Path) -> Layout | None:
    """The original layout that `folder` has, or None; reads names and config.json only.

    Raises ValueError for an original folder that is not whole, or of a kind that is not supported.
    """
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    try:
        parts = parts_of(names)
    except ValueError as error:
        if "config.json" in names and "model_type" not in _config(folder):
            return None  # one part of a diffusers folder; Wan's own config has a model_type
        raise ValueError(f"{folder}: {error}") from error
    if parts is None:
        return None
    kind = _config(folder / next(iter(parts.transformers.values()))).get("model_type")
    if kind not in KINDS:
        raise ValueError(
            f"{folder} is Wan's original {kind!r} model; original folders of {', '.join(KINDS)} are read; "
            f"use the diffusers folder of this model"
        )
    if kind == "i2v" and len(parts.transformers) == 1 and not parts.has_clip:
        raise ValueError(
            f"{folder} is Wan 2.1's image-to-video model, but {CLIP_FILE} is missing; download it"
        )
    return Layout(
        folder=folder,
        kind=kind,
        transformers={name: folder / path for name, path in parts.transformers.items()},
        vae_version=parts.vae_version,
        has_clip=parts.has_clip,
    )


def configs(layout: Layout) -> dict[str, dict[str, Any]]:
    """The diffusers configs of the transformers and the VAE, by component; reads no weights."""
    found = {}
    for name, folder in layout.transformers.items():
        found[name] = _transformer_config(folder, open_checkpoint(resolve_files(folder)))
    path = layout.folder / VAE_FILES[layout.vae_version]
    found["vae"] = _vae_config(layout, open_checkpoint([path]), path)
    return found


def load_original(
    layout: Layout, *, pipeline: str, device: Device, dtype: Callable[[str], torch.dtype]
) -> tuple[dict[str, Any], dict[str, LoadReport]]:
    """The arguments that make a `pipeline` (a class's name) of this folder, and each model's load report.

    Models are on `device`; `dtype` gives each component's, by name. Raises ValueError, naming file and key,
    for what does not fit, before any weights are read.
    """
    if pipeline not in KINDS[layout.kind]:
        raise ValueError(
            f"{layout.folder} holds {layout.name}; this task runs a {pipeline}; "
            f"use the task for {' or '.join(KINDS[layout.kind])}"
        )
    openers = dict.fromkeys(layout.transformers, _open_transformer)
    openers |= {"text_encoder": _open_text_encoder, "vae": _open_vae}
    if pipeline == "WanImageToVideoPipeline" and layout.has_clip:
        openers["image_encoder"] = _open_image_encoder
    opened = {name: opener(layout, name, dtype(name)) for name, opener in openers.items()}
    for model, tensors in opened.values():
        check_fits(model, tensors)
    made: dict[str, Any] = {name: model for name, (model, _) in opened.items()}
    reports = {name: fill(*opened.pop(name), device=device, dtype=dtype(name)) for name in openers}
    if "image_encoder" in made:
        from transformers import CLIPImageProcessor  # whose import warns where torchvision is missing

        made["image_processor"] = CLIPImageProcessor(**_image_sizes(made["image_encoder"].config.image_size))
    made["tokenizer"] = AutoTokenizer.from_pretrained(layout.folder / TOKENIZER, local_files_only=True)
    made["scheduler"] = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT[layout.kind]
    )
    if len(layout.transformers) > 1:
        made["boundary_ratio"] = BOUNDARY_RATIO[layout.kind]
    if layout.kind == "ti2v":
        made["expand_timesteps"] = True
    return made, reports


def _open_transformer(layout: Layout, name: str, dtype: torch.dtype) -> Opened:
    folder = layout.transformers[name]
    tensors = open_checkpoint(resolve_files(folder))
    model = empty_model(WanTransformer3DModel, _transformer_config(folder, tensors), dtype)
    return model, convert_wan_transformer_to_diffusers(tensors)


def _open_vae(layout: Layout, _: str, dtype: torch.dtype) -> Opened:
    path = layout.folder / VAE_FILES[layout.vae_version]
    tensors = open_checkpoint([path])
    model = empty_model(AutoencoderKLWan, _vae_config(layout, tensors, path), dtype)
    convert = convert_wan_vae_to_diffusers if layout.vae_version == "2.1" else keys.vae_22_to_diffusers
    return model, convert(tensors)


def _open_text_encoder(layout: Layout, _: str, dtype: torch.dtype) -> Opened:
    path = layout.folder / T5_FILE
    tensors = open_checkpoint([path])
    config = read_keys(tensors, [path], lambda: keys.t5_config(tensors))
    model = empty_model(UMT5EncoderModel, config, dtype)
    return model, keys.t5_to_transformers(tensors)


def _open_image_encoder(layout: Layout, _: str, dtype: torch.dtype) -> Opened:
    path = layout.folder / CLIP_FILE
    tensors = open_checkpoint([path])
    config = read_keys(tensors, [path], lambda: keys.clip_config(tensors))
    model = empty_model(CLIPVisionModel, config, dtype)
    converted = keys.clip_to_transformers(tensors)
    if any(name.startswith("vision_model.") for name in model.state_dict()):  # an older transformers
        converted = {f"vision_model.{name}": tensor for name, tensor in converted.items()}
    return model, converted


def _image_sizes(edge: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}}


def _transformer_config(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    config = _config(folder)
    needed = ("dim", "ffn_dim", "freq_dim", "in_dim", "out_dim", "num_heads", "num_layers", "eps")
    lacking = [name for name in needed if name not in config]
    if lacking:
        raise ValueError(
            f"{folder / 'config.json'} has no {', '.join(lacking)}; it is not Wan's; download it again"
        )
    return read_keys(tensors, [folder], lambda: keys.transformer_config(config, tensors))


def _vae_config(layout: Layout, tensors: Mapping[str, torch.Tensor], path: Path) -> dict[str, Any]:
    config = read_keys(tensors, [path], lambda: keys.vae_config(tensors, version=layout.vae_version))
    known = LATENT_CHANNELS[layout.vae_version]
    if config["z_dim"] != known:
        raise ValueError(
            f"{path} has {config['z_dim']} latent channels; Wan {layout.vae_version}'s has {known}; "
            f"check the file"
        )
    return config


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object; download the model again")
    return found
