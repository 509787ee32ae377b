"""From a model to its workload: what its config, its folder or its pipeline says, without loading weights."""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from usp.images import at_area
from usp.model_folder import ModelFacts
from usp.model_index import components_in
from usp.plan import ShardPlan
from usp.planner.cost import FP32, Workload
from usp.plans import PLANS, plan_for
from usp.plans.wan import WAN

TEXT_TOKENS = 512  # Wan pads every prompt to this; the others allow as many
LAYER_COUNTS = ("num_layers", "num_single_layers", "n_layers")  # what configs call them, summed
# What pipelines call the pixels, and the frames, of a latent.
SPATIAL = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
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
REFERENCE_AREA = 1024 * 1024
SEEN_EDGE = 28  # pixels, along each side, that Qwen2.5-VL sees as one token


@dataclass(frozen=True, kw_only=True)
class References:
    """How a pipeline takes the images whose tokens it joins to the picture's: at REFERENCE_AREA pixels.

    Of smaller images, only where it is `enlarged`. `seen_area` is that at which its text encoder sees them
    too, whose tokens are part of the text's; 0 if it does not. Source: diffusers 0.42.1.
    """

    enlarged: bool
    seen_area: int = 0


REFERENCES = {
    "QwenImageEditPipeline": References(enlarged=True, seen_area=REFERENCE_AREA),
    "QwenImageEditPlusPipeline": References(enlarged=True, seen_area=384 * 384),
    "Flux2Pipeline": References(enlarged=False),
    "Flux2KleinPipeline": References(enlarged=False),
}


def workload_of_config(
    config: Mapping[str, Any],
    *,
    tokens: int,
    itemsize: int,
    branches: int,
    parameter_bytes: int,
    text_tokens: int = TEXT_TOKENS,
    plan: ShardPlan = WAN,
    batch: int = 1,
    caches: int = 0,
) -> Workload:
    """The workload of a transformer config whose class has this plan; `itemsize` in bytes.

    `tokens` are the picture's, with those of input images; where text is joined to them in attention it is
    counted with them.
    """
    heads = config[plan.head_config]
    size = config[plan.head_dim_config]
    head_dim = sum(size) if isinstance(size, (list, tuple)) else size
    channels = _patch_channels(config, plan)
    joined = any(len(attention.streams) > 1 for attention in plan.attentions)
    return Workload(
        tokens=tokens + text_tokens * joined,
        heads=heads,
        head_dim=head_dim,
        layers=sum(config.get(name) or 0 for name in LAYER_COUNTS),
        ffn_dim=config.get("ffn_dim") or 4 * heads * head_dim,
        itemsize=itemsize,
        patch_channels=channels,
        text_tokens=0 if joined else text_tokens,
        branches=branches,
        batch=batch,
        stacked=plan.stacked,
        parameter_bytes=parameter_bytes,
        latent_bytes=tokens * channels * itemsize,
        caches=caches,
    )


def _patch_channels(config: Mapping[str, Any], plan: ShardPlan) -> int:
    """Channels of a token's part of the noise prediction."""
    names = (*plan.output.channels, "in_channels")
    channels = next(config[name] for name in names if config.get(name))
    if plan.output.times:
        return channels * prod(config[name] for name in plan.output.times)
    patch = config.get("patch_size") or config.get("all_patch_size") or 1
    if isinstance(patch, int) or len(patch) == 1:
        edge = patch if isinstance(patch, int) else patch[0]
        return channels * edge**2
    return channels * prod(patch)


def plan_of_folder(facts: ModelFacts) -> ShardPlan:
    """The plan of the model in a folder; Wan's if its config does not name a class that has one."""
    return PLANS.get(facts.config.get("_class_name", ""), WAN)


def workload_of_folder(
    facts: ModelFacts, call: Mapping[str, Any], *, itemsize: int, cached: bool = False
) -> Workload | None:
    """The workload of a call of the model in a folder; None if its sequence cannot be spread.

    `call` has the pipeline's defaults where it says nothing. Reads configs, and the headers of the weight
    files where they are there.
    """
    plan = plan_of_folder(facts)
    if not plan.attentions:
        return None
    shape = {"width": call["width"], "height": call["height"], "num_frames": call.get("num_frames") or 1}
    picture = facts.tokens(**shape)
    edge = facts.spatial_factor * facts.patch_size[1]
    images = _images(call) if facts.pipeline in REFERENCES else []
    joined, seen = reference_tokens(facts.pipeline, images, edge=edge, picture=picture)
    return workload_of_config(
        facts.config,
        tokens=picture + joined,
        itemsize=itemsize,
        branches=branches_of(call, facts.config, plan),
        parameter_bytes=parameter_bytes(facts.folder, itemsize),
        text_tokens=_text_tokens(call) + seen,
        plan=plan,
        batch=batch_of(call),
        caches=facts.experts * cached,
    )


def workload_of_pipeline(
    pipeline: Any,
    model: nn.Module,
    arguments: Mapping[str, Any],
    *,
    parameter_bytes: int | None = None,
    cached: bool = False,
) -> Workload:
    """The workload of a call of a loaded pipeline; the call's defaults fill in for `arguments`.

    `model` has a plan that spreads its sequence. Text is counted as long as the pipeline allows, and an input
    image of a pipeline that is not in REFERENCES as large as the picture. `parameter_bytes` is
    `pipeline_bytes` of it, where that is known.
    """
    call = call_with_defaults(pipeline, arguments)
    config: Any = model.config
    distilled = getattr(getattr(pipeline, "config", None), "is_distilled", False)
    images = [] if hasattr(pipeline, "vae_scale_factor_spatial") else _images(call)
    picture = max(1, _tokens_of(pipeline, config, call))
    edge = 2 * _factor(pipeline, SPATIAL, 8)
    joined, seen = reference_tokens(type(pipeline).__name__, images, edge=edge, picture=picture)
    return workload_of_config(
        config,
        tokens=picture + joined,
        itemsize=next(model.parameters()).element_size(),
        branches=branches_of(call, {**config, "is_distilled": distilled}, plan_for(model)),
        parameter_bytes=pipeline_bytes(pipeline) if parameter_bytes is None else parameter_bytes,
        text_tokens=_text_tokens(call) + seen,
        plan=plan_for(model),
        batch=batch_of(call),
        caches=sum(type(part).__name__ in PLANS for part in _modules(pipeline)) * cached,
    )


def pipeline_bytes(pipeline: Any) -> int:
    """Bytes of all parameters of a loaded pipeline."""
    return sum(p.numel() * p.element_size() for part in _modules(pipeline) for p in part.parameters())


def _modules(pipeline: Any) -> set[nn.Module]:
    """The pipeline's models; one under two names counts once."""
    return {part for part in pipeline.components.values() if isinstance(part, nn.Module)}


def call_with_defaults(pipeline: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments, with the pipeline's defaults for those that are not given."""
    defaults = {n: p.default for n, p in inspect.signature(pipeline.__call__).parameters.items()}
    return defaults | dict(arguments)


def branches_of(call: Mapping[str, Any], config: Mapping[str, Any], plan: ShardPlan = WAN) -> int:
    """Guidance branches of a call with these arguments, by a model of this config and plan.

    `true_cfg_scale` counts only beside a negative prompt; without it, a model that embeds its guidance, or
    whose pipeline is distilled, has one branch.
    """
    if "true_cfg_scale" in call:
        negative = any(call.get(name) is not None for name in ("negative_prompt", "negative_prompt_embeds"))
        return 2 if negative and (call["true_cfg_scale"] or 1) > 1 else 1
    if config.get("guidance_embeds") or config.get("is_distilled"):
        return 1
    scale = call.get("guidance_scale")
    return 2 if scale is not None and scale > plan.guided_above else 1


def batch_of(call: Mapping[str, Any]) -> int:
    """Pictures that each guidance branch of a call has: prompts, times what is made of each."""
    prompts = call.get("prompt") if call.get("prompt") is not None else call.get("prompt_embeds")
    count = 1 if prompts is None or isinstance(prompts, str) else len(prompts)
    each = (call.get(f"num_{what}_per_prompt") for what in ("images", "videos"))
    return count * next((number for number in each if number), 1)


def reference_tokens(pipeline: str, images: Sequence[Any], *, edge: int, picture: int) -> tuple[int, int]:
    """Tokens that input images add to the picture's, and to the text's, in a pipeline of this class.

    A token is `edge` pixels wide and high. An image whose treatment or size is not known counts as large as
    the picture.
    """
    how = REFERENCES.get(pipeline)
    joined = seen = 0
    for image in images:
        size = getattr(image, "size", None)
        if how is None or not isinstance(size, tuple):
            joined += picture
            continue
        if how.enlarged:
            width, height = at_area(size, REFERENCE_AREA)
        else:
            scale = min(1.0, (REFERENCE_AREA / prod(size)) ** 0.5)
            width, height = (int(side * scale) for side in size)
        joined += (width // edge) * (height // edge)
        if how.seen_area:
            seen += prod(round(side / SEEN_EDGE) for side in at_area(size, how.seen_area))
    return joined, seen


def _images(call: Mapping[str, Any]) -> list[Any]:
    """A call's input images."""
    images = call.get("image")
    return list(images) if isinstance(images, (list, tuple)) else [] if images is None else [images]


def _text_tokens(call: Mapping[str, Any]) -> int:
    return call.get("max_sequence_length") or TEXT_TOKENS


def _tokens_of(pipeline: Any, config: Mapping[str, Any], call: Mapping[str, Any]) -> int:
    """Tokens of the picture that a call asks for."""
    spatial, temporal = _factor(pipeline, SPATIAL, 8), _factor(pipeline, TEMPORAL, 4)
    edge = getattr(pipeline, "default_sample_size", 128)
    height, width = (
        call.get(name) or (config.get(f"sample_{name}") or edge) * spatial for name in ("height", "width")
    )
    patch: Any = config.get("patch_size")
    if "patch_size_t" in config:  # a film, whose config has the two apart
        patch = (config["patch_size_t"] or 1, patch, patch)
    if not isinstance(patch, (list, tuple)):  # an image model: 2 x 2 latents to a token, packed or by patches
        return (height // spatial // 2) * (width // spatial // 2)
    count = call.get("num_frames") or config.get("sample_frames") or 1
    frames = ((count - 1) // temporal + 1) // patch[0]
    return frames * (height // spatial // patch[1]) * (width // spatial // patch[2])


def _factor(pipeline: Any, names: tuple[str, ...], usual: int) -> int:
    """The first of the pipeline's attributes `names` that is set; else the usual factor."""
    return next((factor for name in names if (factor := getattr(pipeline, name, None))), usual)


def parameter_bytes(folder: Path, itemsize: int) -> int:
    """Bytes of all weights of a pipeline folder once loaded, from the headers of its files.

    Floating point weights take `itemsize` bytes each, those of the VAE four (Wan's is kept in fp32). A part
    of a diffusers folder whose weights are not there counts as its config makes it. Of an original folder all
    safetensors and .pth files are counted.
    """
    if not (folder / "model_index.json").is_file():
        files = [*folder.rglob("*.safetensors"), *folder.rglob("*.pth")]
        return sum(_file_bytes(file, itemsize) for file in files)
    parts = components_in(json.loads((folder / "model_index.json").read_text(encoding="utf-8")))
    files = {part: _weight_files(folder / part) for part in parts}
    sizes = {part: FP32 if part == "vae" else itemsize for part in parts}
    here = sum(_file_bytes(file, sizes[part]) for part in parts for file in files[part])
    bare = [part for part in parts if not files[part] and (folder / part / "config.json").is_file()]
    return here + (_bytes_as_made(folder, {part: sizes[part] for part in bare}) if bare else 0)


def _bytes_as_made(folder: Path, itemsizes: Mapping[str, int]) -> int:
    """Bytes of the parameters of these parts of a folder, of which only the configs are needed."""
    from usp.loading import empty_models  # which brings transformers

    found = empty_models(folder, itemsizes.keys())
    return sum(p.numel() * itemsizes[part] for part, model in found.items() for p in model.parameters())


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
