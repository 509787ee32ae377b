"""From a model to its workload: what its config, its folder or its pipeline says, without loading weights."""

import inspect
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from usp.model_folder import ModelFacts
from usp.planner.cost import FP32, Workload

TEXT_TOKENS = 512  # Wan pads every prompt to this
ITEMSIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
FLOATS = ("F64", "F32", "F16", "BF16")


def workload_of_config(
    config: Mapping[str, Any],
    *,
    tokens: int,
    itemsize: int,
    branches: int,
    parameter_bytes: int,
    text_tokens: int = TEXT_TOKENS,
) -> Workload:
    """The workload of a Wan-like transformer config; `tokens` of the whole sequence, `itemsize` in bytes."""
    patch = config["patch_size"]
    volume = prod(patch) if isinstance(patch, (list, tuple)) else patch**2
    channels = (config.get("out_channels") or config["in_channels"]) * volume
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return Workload(
        tokens=tokens,
        heads=config["num_attention_heads"],
        head_dim=config["attention_head_dim"],
        layers=config["num_layers"],
        ffn_dim=config.get("ffn_dim") or 4 * width,
        itemsize=itemsize,
        patch_channels=channels,
        text_tokens=text_tokens,
        branches=branches,
        parameter_bytes=parameter_bytes,
        latent_bytes=tokens * channels * itemsize,
    )


def workload_of_folder(
    facts: ModelFacts, *, width: int, height: int, num_frames: int, guidance_scale: float, itemsize: int
) -> Workload:
    """The workload of one video by the model in a folder; guidance above 1 has two branches.

    Reads the transformer's config and the headers of the weight files, no weights.
    """
    part = facts.folder / "transformer"
    part = part if part.is_dir() else facts.folder / "transformer_2"
    return workload_of_config(
        json.loads((part / "config.json").read_text(encoding="utf-8")),
        tokens=facts.tokens(width=width, height=height, num_frames=num_frames),
        itemsize=itemsize,
        branches=2 if guidance_scale > 1 else 1,
        parameter_bytes=parameter_bytes(facts.folder, itemsize),
    )


def workload_of_pipeline(pipeline: Any, model: nn.Module, arguments: Mapping[str, Any]) -> Workload:
    """The workload of a call of a loaded Wan-like pipeline; the call's defaults fill in for `arguments`."""
    defaults = {n: p.default for n, p in inspect.signature(pipeline.__call__).parameters.items()}
    sizes = {n: arguments.get(n) or defaults.get(n) or 1 for n in ("height", "width", "num_frames")}
    spatial = getattr(pipeline, "vae_scale_factor_spatial", 8)
    temporal = getattr(pipeline, "vae_scale_factor_temporal", 4)
    config: Any = model.config
    patch = config["patch_size"]
    frames = ((sizes["num_frames"] - 1) // temporal + 1) // patch[0]
    tokens = frames * (sizes["height"] // spatial // patch[1]) * (sizes["width"] // spatial // patch[2])
    guidance = arguments.get("guidance_scale", defaults.get("guidance_scale")) or 1
    parts = [c for c in pipeline.components.values() if isinstance(c, nn.Module)]
    return workload_of_config(
        config,
        tokens=max(1, tokens),
        itemsize=next(model.parameters()).element_size(),
        branches=2 if guidance > 1 else 1,
        parameter_bytes=sum(p.numel() * p.element_size() for part in parts for p in part.parameters()),
        text_tokens=arguments.get("max_sequence_length")
        or defaults.get("max_sequence_length")
        or TEXT_TOKENS,
    )


def parameter_bytes(folder: Path, itemsize: int) -> int:
    """Bytes of all weights of a pipeline folder once loaded, from the headers of its files.

    Floating point weights take `itemsize` bytes each, those of the VAE four (Wan's is kept in fp32).
    """
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    parts = [name for name, value in index.items() if isinstance(value, list) and value[0]]
    return sum(
        _file_bytes(file, FP32 if part == "vae" else itemsize)
        for part in parts
        for file in _weight_files(folder / part)
    )


def _weight_files(part: Path) -> list[Path]:
    """The files that a loader would read: the shards of the index, or the one file without a variant."""
    for name in ("diffusion_pytorch_model.safetensors", "model.safetensors"):
        index = part / f"{name}.index.json"
        if index.is_file():
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [part / shard for shard in sorted(set(shards))]
        if (part / name).is_file():
            return [part / name]
    return sorted(part.glob("*.safetensors")) or sorted(part.glob("*.bin"))


def _file_bytes(file: Path, itemsize: int) -> int:
    """Bytes of a file's weights; of one that is not safetensors its size."""
    if file.suffix != ".safetensors":
        return file.stat().st_size
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    sizes = (
        itemsize if entry["dtype"] in FLOATS else ITEMSIZES.get(entry["dtype"], itemsize) for entry in tensors
    )
    return sum(size * prod(entry["shape"]) for size, entry in zip(sizes, tensors, strict=True))
