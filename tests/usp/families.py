"""What each model family does on several ranks, as data: the cells of the README's table, each one a test.

`python -m tests.usp.families` prints the table.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from torch import nn

from tests.usp.in_ranks import SEED, error_of, seeded
from usp.config import CacheConfig
from usp.demo import tiny
from usp.pipeline import ParallelPipeline
from usp.plans import PLANS

# Warm-up and last step are computed, all between is skipped: decisions that do not hang on a rounding.
ALWAYS = CacheConfig(threshold=1e6, warmup_steps=1, max_skip_streak=9)
STEPS = {"num_inference_steps": 4}
UNET = "sequence parallelism does not apply"
ONE_PROMPT = "its pipeline takes one prompt"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run on `size` ranks.

    `refused` is a part of the error that stands for it instead of a result, `why` that in the table's words.
    """

    size: int
    layout: str
    cache: CacheConfig | None = None
    lora: bool = False
    batch: bool = False
    refused: str | None = None
    why: str = ""


CELLS = {
    "Ulysses": Cell(size=3, layout="ulysses3"),
    "gather-KV": Cell(size=3, layout="gather_kv3"),
    "ring": Cell(size=2, layout="ring2"),
    "USP": Cell(size=4, layout="ulysses2 ring2"),
    "CFG": Cell(size=2, layout="cfg2"),
    "CFG x SP": Cell(size=4, layout="cfg2 gather_kv2"),
    "cache": Cell(size=2, layout="ulysses2", cache=ALWAYS),
    "LoRA": Cell(size=2, layout="gather_kv2", lora=True),
    "batch": Cell(size=3, layout="ring3", batch=True),
}
SEQUENCE = ("Ulysses", "gather-KV", "ring", "USP", "CFG x SP", "cache")

# Cells that differ from CELLS, and why.
BATCH = Cell(size=3, layout="ring3", batch=True)
NO_SEQUENCE = Cell(size=2, layout="ulysses2", refused=UNET, why="a UNet has no sequence to spread")
UNLIKE: dict[str, dict[str, Cell]] = {
    "wan-vace": {"batch": replace(BATCH, refused="list of prompts is not yet supported", why=ONE_PROMPT)},
    "qwen-image-edit": {"batch": replace(BATCH, refused="The total number of <|image_pad|>", why=ONE_PROMPT)},
    "qwen-image-edit-plus": {"batch": replace(BATCH, refused="only supports batch_size=1", why=ONE_PROMPT)},
    "sd15": {
        **dict.fromkeys(SEQUENCE, NO_SEQUENCE),
        "cache": Cell(
            size=2,
            layout="cfg2",
            cache=ALWAYS,
            refused="has 0 blocks",
            why="a UNet has no list of blocks",
        ),
        "LoRA": Cell(size=2, layout="cfg2", lora=True),
        "batch": Cell(size=3, layout="cfg3", batch=True),
    },
}
LABELS = {
    "wan-t2v": "Wan 2.1 T2V",
    "wan22-t2v": "Wan 2.2 T2V, two experts",
    "wan-i2v": "Wan 2.1 I2V",
    "wan22-i2v": "Wan 2.2 I2V, two experts",
    "wan-ti2v": "Wan 2.2 TI2V",
    "wan-vace": "Wan VACE",
    "qwen-image": "Qwen-Image",
    "qwen-image-edit": "Qwen-Image-Edit",
    "qwen-image-edit-plus": "Qwen-Image-Edit-Plus",
    "flux": "FLUX.1",
    "flux2": "FLUX.2 dev",
    "flux2-klein": "FLUX.2 klein",
    "sd3": "SD 3, 3.5",
    "z-image": "Z-Image",
    "hunyuan-video": "HunyuanVideo",
    "ltx-video": "LTX-Video",
    "cogvideox": "CogVideoX",
    "sd15": "SD 1.5 (UNet)",
}


def cell_of(family: str, column: str) -> Cell:
    """What is tested of a family in a column."""
    return UNLIKE.get(family, {}).get(column, CELLS[column])


def transformers_of(pipeline: Any) -> dict[str, nn.Module]:
    """The pipeline's models with a plan, by name."""
    parts = {n: c for n, c in pipeline.components.items() if isinstance(c, nn.Module)}
    return {n: c for n, c in parts.items() if type(c).__name__ in PLANS and not n.startswith("controlnet")}


def pipeline_of(family: str, cell: Cell) -> Any:
    """A fresh tiny pipeline, with a LoRA if the cell wants one."""
    pipeline = tiny.build(family)
    pipeline.set_progress_bar_config(disable=True)
    if cell.lora:
        name, model = next(iter(transformers_of(pipeline).items()))
        pipeline.load_lora_weights(lora_for(name, model), adapter_name="test")
    return pipeline


def lora_for(name: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """A LoRA of rank 2 on every projection to queries of a model, in peft's layout."""
    generator, state = seeded(3), {}
    for path, layer in model.named_modules():
        if path.endswith("to_q") and isinstance(layer, nn.Linear):
            sizes = {"A": (2, layer.in_features), "B": (layer.out_features, 2)}
            for half, shape in sizes.items():
                weight = 0.3 * torch.randn(*shape, generator=generator)
                state[f"{name}.{path}.lora_{half}.weight"] = weight
    assert state, f"{type(model).__name__} has no projection to queries"
    return state


def call_of(family: str, cell: Cell, pipeline: Any) -> dict[str, Any]:
    """The arguments of this pipeline's call; of a batch, two prompts of unlike length, each of them twice."""
    call = {**tiny.call_arguments(family), **STEPS, "output_type": "latent"}
    if not cell.batch:
        return call
    call["prompt"] = [call["prompt"], "a square"]
    if "num_images_per_prompt" in inspect.signature(type(pipeline).__call__).parameters:
        call["num_images_per_prompt"] = 2
    if "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"], "blurry"]
    return call


@contextmanager
def small_references() -> Iterator[None]:
    """Qwen's edit pipelines bring every input image to a megapixel; a sixteenth is as good a test."""
    modules = (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus)
    kept = [module.calculate_dimensions for module in modules]
    for module, original in zip(modules, kept, strict=True):
        module.calculate_dimensions = partial(lambda area, ratio, of: of(area // 16, ratio), of=original)
    try:
        yield
    finally:
        for module, original in zip(modules, kept, strict=True):
            module.calculate_dimensions = original


def picture_of(result: Any) -> np.ndarray:
    """The latents that a pipeline gave."""
    found = result.frames if hasattr(result, "frames") else result.images
    found = found[0] if isinstance(found, (list, tuple)) and len(found) == 1 else found
    return np.asarray(found.cpu() if isinstance(found, torch.Tensor) else found)


def alone(family: str, cell: Cell) -> np.ndarray:
    """One process's latents; with the cache, if there is one."""
    return _alone(family, replace(cell, size=1, layout="auto"))


@cache
def _alone(family: str, cell: Cell) -> np.ndarray:
    pipeline = pipeline_of(family, cell)
    call = call_of(family, cell, pipeline)
    if cell.cache is None:
        with small_references():
            return picture_of(pipeline(**call, generator=seeded(SEED)))
    with small_references(), ParallelPipeline(pipeline, cache=cell.cache) as pipe:
        return picture_of(pipe(**call, seed=SEED))


def together(family: str, cell: Cell) -> tuple[np.ndarray | None, str, list[str]]:
    """This rank's latents, or the error, and what its cache did."""
    pipeline, found, reports = pipeline_of(family, cell), None, []

    def run() -> None:
        nonlocal found
        with small_references(), ParallelPipeline(pipeline, cell.layout, cache=cell.cache) as pipe:
            found = picture_of(pipe(**call_of(family, cell, pipeline), seed=SEED))
            assert pipe.report is not None
            reports.extend(branch["text"] for branch in pipe.report.cache.values())

    error = error_of(run)
    return found, error, reports


def table() -> str:
    """The README's table in Markdown, reasons below."""
    reasons: list[str] = []

    def mark(cell: Cell) -> str:
        if cell.refused is None:
            return "yes"
        if cell.why not in reasons:
            reasons.append(cell.why)
        return f"no ({reasons.index(cell.why) + 1})"

    lines = ["| model | " + " | ".join(CELLS) + " |", "|---|" + "---|" * len(CELLS)]
    for family, label in LABELS.items():
        marks = [mark(cell_of(family, column)) for column in CELLS]
        lines.append(f"| {label} | " + " | ".join(marks) + " |")
    notes = "; ".join(f"({place}) {why}" for place, why in enumerate(reasons, start=1))
    return "\n".join([*lines, "", f"No: {notes}."])


if __name__ == "__main__":
    show: Callable[[str], None] = print
    show(table())
