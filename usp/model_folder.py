"""What a diffusers folder says about itself, read before any weights: enough to refuse what cannot work."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from usp.model_index import components_in


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The sizes that a pipeline folder fixes; scale factors are pixels, or frames, per latent.

    A model of images makes one frame. `max_positions` is None where positions are computed for any size.
    `experts` counts the transformers that take turns over the steps.
    """

    folder: Path
    pipeline: str
    heads: int
    spatial_multiple: int
    temporal_factor: int
    spatial_factor: int
    patch_size: tuple[int, int, int]
    max_positions: int | None = 1024  # tokens along each of time, height and width
    vae_in_fp32: bool = True
    keeps_first_frame: bool = False  # Wan 2.2 5B: an image takes a frame's place, not further channels
    experts: int = 1
    config: Mapping[str, Any] = field(
        default_factory=dict, repr=False
    )  # the transformer's, in diffusers' words

    def check_size(self, *, width: int, height: int, num_frames: int) -> None:
        """Raise ValueError, naming the nearest sizes that work, unless the model makes exactly this size."""
        step = self.spatial_multiple
        for name, value in (("width", width), ("height", height)):
            if value < step or value % step:
                lower = max(step, value // step * step)
                raise ValueError(
                    f"{name} {value} was asked for; this model makes multiples of {step} pixels; use {lower} "
                    f"or {max(lower, value // step * step) + step}"
                )
            most = self._most_pixels(name)
            if most is not None and value > most:
                raise ValueError(
                    f"{name} {value} was asked for; this model has {self.max_positions} positions along it, "
                    f"which is {most} pixels; use {most // step * step} or less"
                )
        self._check_frames(num_frames)

    def fitted(self, *, width: int, height: int) -> tuple[int, int]:
        """The nearest width and height that the model makes and that are no larger, or its smallest."""
        step = self.spatial_multiple
        sizes = (
            min(value, self._most_pixels(name) or value)
            for name, value in (("width", width), ("height", height))
        )
        fitted_width, fitted_height = (max(step, size // step * step) for size in sizes)
        return fitted_width, fitted_height

    def tokens(self, *, width: int, height: int, num_frames: int) -> int:
        """Tokens of the transformer's sequence for a picture of this size.

        Text and images that are joined with it come on top. For a UNet, the places of its first level.
        """
        frames = (num_frames - 1) // self.temporal_factor + 1
        per_frame = (height // self.spatial_factor // self.patch_size[1]) * (
            width // self.spatial_factor // self.patch_size[2]
        )
        return frames // self.patch_size[0] * per_frame

    def _most_pixels(self, name: str) -> int | None:
        if self.max_positions is None:
            return None
        return self.max_positions * self.spatial_factor * self.patch_size[2 if name == "width" else 1]

    def _check_frames(self, num_frames: int) -> None:
        step = self.temporal_factor
        if self.max_positions is not None:
            most = self.max_positions * self.patch_size[0] * step - step + 1
            if num_frames > most:
                raise ValueError(
                    f"{num_frames} frames were asked for; this model has {self.max_positions} positions in "
                    f"time, which is {most} frames; use {most} or less"
                )
        if num_frames < 1 or (num_frames - 1) % step:
            lower = max(1, (num_frames - 1) // step * step + 1)
            raise ValueError(
                f"{num_frames} frames were asked for; this model makes 1 more than a multiple of {step}; use "
                f"{lower} or {lower + step}"
            )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a family's config files say what its sizes are.

    `heads`, `patch` and `positions` name entries of the config of `parts`, the first that is there; a number
    for `patch` is what the pipeline itself packs into a token. `multiple` is what the pipeline asks of sizes.
    """

    parts: tuple[str, ...] = ("transformer",)
    heads: str = "num_attention_heads"
    patch: str | int = 2
    positions: str | None = None
    positions_default: int | None = None
    multiple: int = 1
    video: bool = False
    vae_in_fp32: bool = False  # half precision costs contrast there, and the pipeline casts what it decodes


WAN = Layout(
    parts=("transformer", "transformer_2"),
    patch="patch_size",
    positions="rope_max_seq_len",
    positions_default=1024,
    multiple=16,
    video=True,
    vae_in_fp32=True,
)
PACKED = Layout()  # 2 x 2 latents to a token, whatever the transformer's config says
LAYOUTS: dict[str, Layout] = {
    "WanPipeline": WAN,
    "WanImageToVideoPipeline": WAN,
    "WanVACEPipeline": WAN,
    "QwenImagePipeline": PACKED,
    "QwenImageEditPipeline": PACKED,
    "QwenImageEditPlusPipeline": PACKED,
    "FluxPipeline": PACKED,
    "Flux2Pipeline": PACKED,
    "Flux2KleinPipeline": PACKED,
    "StableDiffusion3Pipeline": Layout(patch="patch_size", positions="pos_embed_max_size"),
    "ZImagePipeline": Layout(heads="n_heads", patch="all_patch_size", positions="axes_lens"),
    "StableDiffusionPipeline": Layout(parts=("unet",), heads="attention_head_dim", patch=1),
}


def read_model_folder(folder: Path, *, pipeline: str | tuple[str, ...], weights: bool = True) -> ModelFacts:
    """The facts of a folder that holds a pipeline of class `pipeline`, or of one of these.

    Raises ValueError, naming the file, if the folder is not one, or a part is missing; where `weights` are
    needed, also for those.
    """
    if not folder.is_dir():
        raise ValueError(f"model {str(folder)!r} is not a folder here; give a diffusers folder or a hub name")
    wanted = (pipeline,) if isinstance(pipeline, str) else pipeline
    if not (folder / "model_index.json").is_file() and (facts := _original(folder, wanted)) is not None:
        return facts
    index = _read_json(folder / "model_index.json")
    found = index.get("_class_name", "folder without _class_name in model_index.json")
    if found not in wanted:
        raise ValueError(
            f"{folder} holds a {found}; this task runs a {' or '.join(wanted)}; use the task for {found}"
        )
    layout = LAYOUTS[found]
    parts = components_in(index)
    _check_parts(folder, parts, layout, weights)
    models = [name for name in layout.parts if name in parts]
    facts = _facts(folder, found, layout, models[0])
    distilled = bool(index.get("is_distilled"))  # the pipeline's, not the model's, and it turns guidance off
    config = {**facts.config, "is_distilled": distilled}
    keeps_first_frame = bool(index.get("expand_timesteps"))
    return replace(facts, config=config, keeps_first_frame=keeps_first_frame, experts=len(models))


def _check_parts(folder: Path, parts: list[str], layout: Layout, weights: bool) -> None:
    for part in parts:
        if not (folder / part).is_dir():
            raise ValueError(
                f"{folder / 'model_index.json'} names {part}, but {folder / part} does not exist"
            )
    models = [name for name in layout.parts if name in parts]
    if not models:
        names = " nor ".join(layout.parts)
        raise ValueError(
            f"{folder} has {'neither ' if len(layout.parts) > 1 else 'no '}{names}; there is nothing to run"
        )
    encoders = [name for name in parts if name.startswith(("text_encoder", "image_encoder"))]
    for part in (*models, "vae", *encoders) if weights else ():
        _check_weights(folder / part)
    if "scheduler" in parts:
        _read_json(folder / "scheduler" / "scheduler_config.json")
    for part in parts:
        if not any((folder / part).iterdir()):
            raise ValueError(f"{folder / part} is empty; download the model again")


def _original(folder: Path, wanted: tuple[str, ...]) -> ModelFacts | None:
    """The facts of an original Wan folder, from the headers of its files; None if it is none."""
    from usp.original_layouts import KINDS, configs, detect  # which bring diffusers

    original = detect(folder)
    if original is None:
        return None
    found = next((name for name in wanted if name in KINDS[original.kind]), None)
    if found is None:
        raise ValueError(
            f"{folder} holds {original.name}; this task runs a {' or '.join(wanted)}; use the task for "
            f"{' or '.join(KINDS[original.kind])}"
        )
    read = configs(original)
    config = {"_class_name": "WanTransformer3DModel", **read[next(iter(original.transformers))]}
    vae = {
        "scale_factor_spatial": 8,
        "scale_factor_temporal": 4,
        **read["vae"],
    }  # AutoencoderKLWan's defaults
    facts = _facts_of(folder, found, LAYOUTS[found], (config, folder), (vae, folder))
    experts = len(original.transformers)
    return replace(facts, keeps_first_frame=original.kind == "ti2v", experts=experts)


def _facts(folder: Path, pipeline: str, layout: Layout, part: str) -> ModelFacts:
    """The facts from the config files of the model's part and of the VAE."""
    paths = [folder / name / "config.json" for name in (part, "vae")]
    config, vae = ((_read_json(path), path) for path in paths)
    return _facts_of(folder, pipeline, layout, config, vae)


def _facts_of(
    folder: Path,
    pipeline: str,
    layout: Layout,
    model: tuple[Mapping[str, Any], Path],
    vae: tuple[Mapping[str, Any], Path],
) -> ModelFacts:
    """The facts from two configs, each with where it was read."""
    config, path = model
    for name in (layout.heads, layout.patch):
        if isinstance(name, str) and name not in config:
            raise ValueError(f"{path} has no {name}; a {pipeline} needs one; check the path")
    heads = config[layout.heads]
    patch = _patch(config[layout.patch] if isinstance(layout.patch, str) else layout.patch)
    spatial, temporal = _vae_factors(*vae)
    positions = config.get(layout.positions, layout.positions_default) if layout.positions else None
    return ModelFacts(
        folder=folder,
        pipeline=pipeline,
        heads=heads if isinstance(heads, int) else heads[0],
        spatial_multiple=math.lcm(spatial * patch[1], layout.multiple),
        max_positions=min(positions[1:]) if isinstance(positions, list) else positions,
        temporal_factor=temporal if layout.video else 1,
        spatial_factor=spatial,
        patch_size=patch,
        vae_in_fp32=layout.vae_in_fp32,
        config=config,
    )


def _patch(value: Any) -> tuple[int, int, int]:
    """Latents to a token along time, height and width, from what a config writes for it."""
    sizes = list(value) if isinstance(value, (list, tuple)) else [value]
    return (1, sizes[0], sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1], sizes[2])


def _vae_factors(config: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """Pixels and frames per latent. The entries are the ones that the pipelines themselves read."""
    halvings = config.get("temperal_downsample")  # diffusers' spelling; one entry per halving of the size
    if "scale_factor_spatial" in config:
        return config["scale_factor_spatial"], config.get("scale_factor_temporal", 4)
    if halvings is not None:
        return 2 ** len(halvings), 2 ** sum(map(bool, halvings))
    if "block_out_channels" in config:
        return 2 ** (len(config["block_out_channels"]) - 1), 1
    raise ValueError(f"{path} does not say by how much this VAE shrinks a picture; check the path")


def _check_weights(part: Path) -> None:
    """Raise ValueError, naming the file, if a part of the model has no weights or lacks one of its shards."""
    for index in part.glob("*.index.json"):
        shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [shard for shard in shards if not (part / shard).is_file()]
        if missing:
            raise ValueError(
                f"{index} lists {len(shards)} files, {len(missing)} are missing, the first is "
                f"{part / missing[0]}; download the model again"
            )
    if not any(part.glob("*.safetensors")) and not any(part.glob("*.bin")):
        raise ValueError(f"{part} holds no weights (*.safetensors); download the model again")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a diffusers pipeline folder has it; check the path")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object; download the model again")
    return found
