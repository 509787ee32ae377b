"""Assembling the trained parts into a WanPipeline and writing it as an ordinary diffusers folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5EncoderModel

from usp.demo import text

FLOW_SHIFT = 3.0


def build_pipeline(
    vae: AutoencoderKLWan, transformer: WanTransformer3DModel, text_encoder: UMT5EncoderModel
) -> WanPipeline:
    """The parts as one pipeline, with the demo's tokenizer and the scheduler of Wan's own repositories."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT
    )
    parts: dict[str, Any] = {"tokenizer": text.build_tokenizer(), "scheduler": scheduler}
    return WanPipeline(
        **parts, text_encoder=text_encoder.eval(), vae=vae.eval(), transformer=transformer.eval()
    )


def export(pipeline: WanPipeline, out: Path) -> int:
    """Write `pipeline` to the folder `out` in float16 and return its bytes; `out` is replaced by renames."""
    temporary, previous = out.with_name(out.name + ".tmp"), out.with_name(out.name + ".old")
    for leftover in (temporary, previous):
        shutil.rmtree(leftover, ignore_errors=True)
    pipeline.to(torch.float16).save_pretrained(temporary)
    _name_tokenizer_class(temporary)
    for path in temporary.rglob("*.safetensors"):
        path.chmod(0o644)
    if out.exists():
        out.rename(previous)
    temporary.rename(out)
    shutil.rmtree(previous, ignore_errors=True)
    return folder_bytes(out)


def folder_bytes(folder: Path) -> int:
    """The bytes of all files under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _name_tokenizer_class(folder: Path) -> None:
    """Name the tokenizer's class as transformers 4 and 5 both know it; version 5 writes a newer name."""
    index_path, config_path = folder / "model_index.json", folder / "tokenizer" / "tokenizer_config.json"
    index, config = (json.loads(path.read_text()) for path in (index_path, config_path))
    index["tokenizer"] = ["transformers", "PreTrainedTokenizerFast"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for path, content in ((index_path, index), (config_path, config)):
        path.write_text(json.dumps(content, indent=2) + "\n")
