"""Model folders with one thing wrong, made without weights: reading facts must not need them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from usp.demo import MODEL_DIR


def copy_of_demo(folder: Path) -> Path:
    """The bundled model's folder with empty weight files: enough to be checked, not enough to be loaded."""
    for source in MODEL_DIR.rglob("*"):
        target = folder / source.relative_to(MODEL_DIR)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            weights = source.suffix == ".safetensors"
            target.write_bytes(b"" if weights else source.read_bytes())
    return folder


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def remove(path: Path) -> None:
    """Remove a file, or a folder with the files in it."""
    for file in path.iterdir() if path.is_dir() else [path]:
        file.unlink()
    if path.is_dir():
        path.rmdir()


def _lose_shard(folder: Path) -> None:
    part = folder / "transformer"
    remove(part / "diffusion_pytorch_model.safetensors")
    names = [f"diffusion_pytorch_model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    weights = {f"blocks.{i}.weight": name for i, name in enumerate([*names, names[0]])}
    index = part / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    (part / names[0]).touch()


# What is done to the folder, and what is then said of it; {folder} is its path.
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no index": (
        lambda f: remove(f / "model_index.json"),
        "{folder}/model_index.json does not exist; a diffusers pipeline folder has it; check the path",
    ),
    "index cut short": (
        lambda f: (f / "model_index.json").write_text('{"_class_name": "Wan') and None,
        "{folder}/model_index.json is not valid JSON "
        "(Unterminated string starting at: line 1 column 17 (char 16)); download the model again",
    ),
    "another pipeline": (
        lambda f: change(f / "model_index.json", _class_name="FluxPipeline"),
        "{folder} holds a FluxPipeline; this task runs a WanPipeline; use the task for FluxPipeline",
    ),
    "a part is missing": (
        lambda f: remove(f / "vae"),
        "{folder}/model_index.json names vae, but {folder}/vae does not exist",
    ),
    "no transformer at all": (
        lambda f: change(f / "model_index.json", transformer=[None, None]),
        "{folder} has neither transformer nor transformer_2; there is nothing to run",
    ),
    "a config is missing": (
        lambda f: remove(f / "transformer" / "config.json"),
        "{folder}/transformer/config.json does not exist; a diffusers pipeline folder has it; check the path",
    ),
    "no weights": (
        lambda f: remove(f / "text_encoder" / "model.safetensors"),
        "{folder}/text_encoder holds no weights (*.safetensors); download the model again",
    ),
    "shards are missing": (
        _lose_shard,
        "{folder}/transformer/diffusion_pytorch_model.safetensors.index.json lists 3 files, 2 are missing, "
        "the first is {folder}/transformer/diffusion_pytorch_model-00002-of-00003.safetensors; "
        "download the model again",
    ),
}
# The same promise, where only the file that is wrong is asked for by name.
MORE_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "the index is a list": (lambda f: (f / "model_index.json").write_text("[]") and None, "model_index.json"),
    "the index is no text": (
        lambda f: (f / "model_index.json").write_bytes(b"\xff\xfe\x00") and None,
        "model_index.json",
    ),
    "a config lacks its heads": (
        lambda f: change(f / "transformer" / "config.json", num_attention_heads=None),
        "transformer/config.json",
    ),
    "no scheduler config": (
        lambda f: remove(f / "scheduler" / "scheduler_config.json"),
        "scheduler/scheduler_config.json",
    ),
    "an empty tokenizer": (
        lambda f: [remove(f / "tokenizer" / n) for n in ("tokenizer.json", "tokenizer_config.json")] and None,
        "tokenizer",
    ),
}
