"""What a diffusers folder says about itself, read before any weights: enough to refuse what cannot work."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The sizes that a Wan-like pipeline folder fixes; scale factors are pixels per latent."""

    folder: Path
    pipeline: str
    heads: int
    spatial_multiple: int
    temporal_factor: int
    spatial_factor: int
    patch_size: tuple[int, int, int]
    max_positions: int = 1024  # tokens along each of time, height and width

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
            most = self.max_positions * self.spatial_factor * self.patch_size[2 if name == "width" else 1]
            if value > most:
                raise ValueError(
                    f"{name} {value} was asked for; this model has {self.max_positions} positions along it, "
                    f"which is {most} pixels; use {most // step * step} or less"
                )
        step = self.temporal_factor
        most = self.max_positions * self.patch_size[0] * step - step + 1
        if num_frames > most:
            raise ValueError(
                f"{num_frames} frames were asked for; this model has {self.max_positions} positions in time, "
                f"which is {most} frames; use {most} or less"
            )
        if num_frames < 1 or (num_frames - 1) % step:
            lower = max(1, (num_frames - 1) // step * step + 1)
            raise ValueError(
                f"{num_frames} frames were asked for; this model makes 1 more than a multiple of {step}; use "
                f"{lower} or {lower + step}"
            )

    def tokens(self, *, width: int, height: int, num_frames: int) -> int:
        """Tokens of the transformer's sequence for a video of this size."""
        frames = (num_frames - 1) // self.temporal_factor + 1
        per_frame = (height // self.spatial_factor // self.patch_size[1]) * (
            width // self.spatial_factor // self.patch_size[2]
        )
        return frames // self.patch_size[0] * per_frame


def read_model_folder(folder: Path, *, pipeline: str) -> ModelFacts:
    """The facts of a folder that holds a pipeline of class `pipeline`.

    Raises ValueError, naming the file, if the folder is not one, or a part or its weights are missing.
    """
    if not folder.is_dir():
        raise ValueError(f"model {str(folder)!r} is not a folder here; give a diffusers folder or a hub name")
    index = _read_json(folder / "model_index.json")
    found = index.get("_class_name", "folder without _class_name in model_index.json")
    if found != pipeline:
        raise ValueError(f"{folder} holds a {found}; this task runs a {pipeline}; use the task for {found}")
    parts = [name for name, value in index.items() if isinstance(value, list) and value[0]]
    for part in parts:
        if not (folder / part).is_dir():
            raise ValueError(
                f"{folder / 'model_index.json'} names {part}, but {folder / part} does not exist"
            )
    transformers = [p for p in ("transformer", "transformer_2") if p in parts]
    if not transformers:
        raise ValueError(f"{folder} has neither transformer nor transformer_2; there is nothing to run")
    for part in (*transformers, "vae", "text_encoder"):
        _check_weights(folder / part)
    if "scheduler" in parts:
        _read_json(folder / "scheduler" / "scheduler_config.json")
    for part in parts:
        if not any((folder / part).iterdir()):
            raise ValueError(f"{folder / part} is empty; download the model again")
    transformer, vae = (_read_json(folder / p / "config.json") for p in (transformers[0], "vae"))
    for name in ("patch_size", "num_attention_heads"):
        if name not in transformer:
            path = folder / transformers[0] / "config.json"
            raise ValueError(f"{path} has no {name}; this task runs a Wan transformer; check the path")
    spatial, patch = vae.get("scale_factor_spatial", 8), transformer["patch_size"]
    step = spatial * patch[1]
    return ModelFacts(
        folder=folder,
        pipeline=pipeline,
        heads=transformer["num_attention_heads"],
        spatial_multiple=math.lcm(step, 16),  # WanPipeline itself wants multiples of 16
        max_positions=transformer.get("rope_max_seq_len", 1024),
        temporal_factor=vae.get("scale_factor_temporal", 4),
        spatial_factor=spatial,
        patch_size=tuple(patch),
    )


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
