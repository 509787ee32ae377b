"""From a folder, with or without single files beside it, to a pipeline on this rank's device; no network."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.models.modeling_utils import ModelMixin

from runtime.checkpoint import open_checkpoint, resolve_files
from runtime.device import Device
from runtime.hub import Patterns, local_folder
from runtime.loading import LoadReport
from runtime.world import World
from usp.model_index import components_in
from usp.original_layouts import configs, detect, load_original
from usp.parts import check_fits, empty_model, fill, read_keys
from usp.processors import parts_without_torchvision

COMFY_PREFIX = "model.diffusion_model."  # in files that hold a whole pipeline


def hub_folder(name: str, world: World, *, hub: str, weights: bool = True) -> Path:
    """The folder of the model `name` on `hub`, downloaded once per host: `wanted_files` of it, or without
    `weights` its `config_files`.

    Every rank must call it; it waits on the store. Raises as `runtime.hub.local_folder` does.
    """
    then = wanted_files if weights else config_files
    return local_folder(name, world, first=Patterns(["model_index.json"]), then=then, hub=hub)


def config_files(folder: Path) -> Patterns:
    """Which files say what the model with this model_index.json is; all of an original layout, which says it
    in the headers of its weights."""
    if not (folder / "model_index.json").is_file():
        return wanted_files(folder)
    parts = components_in(_index(folder))
    return Patterns(["model_index.json", *(f"{part}/*config.json" for part in parts)])


def wanted_files(folder: Path) -> Patterns:
    """Which files are needed of a model with this model_index.json, or with none: an original layout."""
    path = folder / "model_index.json"
    if not path.is_file():
        return Patterns(["*.json", "*.safetensors", "*.pth", "*.model"])
    parts = components_in(_index(folder))
    other_forms = ["*.bin", "*.pt", "*.ckpt", "*.msgpack", "*.h5", "*.onnx*", "*.fp16.*", "*.non_ema.*"]
    return Patterns(["model_index.json", *(f"{part}/*" for part in parts)], other_forms)


def load_pipeline(
    folder: Path,
    *,
    pipeline: str,
    device: Device,
    dtypes: Mapping[str, torch.dtype],
    files: Mapping[str, str | Path] | None = None,
) -> tuple[Any, dict[str, LoadReport]]:
    """The pipeline of class `pipeline` in `folder`, its models on `device`, and what loading each here did.

    `folder` has diffusers' layout or Wan's original one. `dtypes` has "default" and may name components.
    `files` replaces the weights of components of a diffusers folder, by name: a file, a folder or a glob, in
    diffusers' keys or the original (also ComfyUI's). Not a collective, but every rank loads alike.
    Raises ValueError that names the file, and the key, for what is missing, too many, or does not fit; for
    models that are loaded here before any weights are read.
    """
    files = dict(files or {})
    cls = getattr(diffusers, pipeline)

    def dtype(name: str) -> torch.dtype:
        return dtypes.get(name, dtypes["default"])

    _check_named(folder, files)
    layout = detect(folder)
    if layout is not None:
        made, reports = load_original(layout, pipeline=pipeline, device=device, dtype=dtype)
        return cls(**made), reports
    made, reports = {}, {}
    models = _models(_index(folder))
    opened = {name: _open(folder / name, kind, dtype(name), files.get(name)) for name, kind in models.items()}
    for name, kind in models.items():
        part = opened.pop(name)  # and with it the mapped files, once its model is filled
        if part is not None:
            made[name], reports[name] = part[0], fill(*part, device=device, dtype=dtype(name))
        else:
            model = _class(kind).from_pretrained(folder / name, dtype=dtype(name), local_files_only=True)
            made[name] = model.to(device.torch_device)
    rest = {"dtype": dict(dtypes), "local_files_only": True, **parts_without_torchvision(folder)}
    return cls.from_pretrained(folder, **made, **rest), reports


def check_weights(folder: Path, files: Mapping[str, str | Path]) -> None:
    """Raise ValueError unless `files` are there, and each has the keys and shapes of its model of diffusers
    in `folder`.

    Reads configs and the headers of `files`.
    """
    _check_named(folder, files)
    models = _models(_index(folder)) if files else {}
    for name, file in files.items():
        _open(folder / name, models[name], torch.float32, file)


def empty_models(folder: Path, names: Collection[str] | None = None) -> dict[str, Any]:
    """The models of these names (None: all) in a folder, by name, without weights."""
    dtype = torch.float32
    if (layout := detect(folder)) is not None:
        found = configs(layout)
        return {
            name: empty_model(diffusers.WanTransformer3DModel, found[name], dtype)
            for name in layout.transformers
            if names is None or name in names
        }
    models = _models(_index(folder))
    chosen = {name: kind for name, kind in models.items() if names is None or name in names}
    return {name: empty_model(_class(kind), _config(folder / name), dtype) for name, kind in chosen.items()}


def _check_named(folder: Path, files: Mapping[str, str | Path]) -> None:
    """Raise ValueError unless `files` are there, and each is for a model of diffusers in `folder`."""
    if not files:
        return
    if (layout := detect(folder)) is not None:
        raise ValueError(
            f"{folder} holds {layout.name}; {', '.join(files)} can be replaced in diffusers folders"
        )
    index = _index(folder)
    models = _models(index)
    for name, file in files.items():
        kind = index.get(name)
        if not isinstance(kind, list):
            raise ValueError(
                f"weights of {name!r} were given; {folder / 'model_index.json'} names no such component"
            )
        if models.get(name, ("", ""))[0] != "diffusers":
            raise ValueError(
                f"{file} was given for {name}, a {kind[1]}; files of diffusers' models are taken"
            )
        resolve_files(file)


def quiet() -> None:
    """Hide the loading bars of diffusers and transformers in this process."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def _models(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Components that are models of diffusers or transformers, as (library, class)."""
    found = {}
    bases = {"diffusers": ModelMixin, "transformers": transformers.PreTrainedModel}
    for name, value in index.items():
        if isinstance(value, list) and value[0] in bases:
            cls = getattr(diffusers if value[0] == "diffusers" else transformers, value[1], None)
            if isinstance(cls, type) and issubclass(cls, bases[value[0]]):
                found[name] = (value[0], value[1])
    return found


def _open(
    folder: Path, kind: tuple[str, str], dtype: torch.dtype, file: str | Path | None
) -> tuple[Any, dict[str, torch.Tensor]] | None:
    """One model without weights and the tensors that fit it, unread.

    None where its library's own loader is to be used: of transformers, or if there are no safetensors.
    """
    config = _config(folder)
    plain = "quantization_config" not in config and (file is not None or any(folder.glob("*.safetensors")))
    if kind[0] != "diffusers" or not plain:
        if file is not None:
            raise ValueError(f"{file} was given for {folder.name}, which is quantised; leave the file out")
        return None
    model = empty_model(_class(kind), config, dtype)
    paths = resolve_files(folder if file is None else file)
    tensors = open_checkpoint(paths)
    if file is not None:
        tensors = single_file_tensors(model, config, tensors, paths)
    else:
        model._fix_state_dict_keys_on_load(tensors)  # names of old attention blocks
    check_fits(model, tensors)
    return model, tensors


def _class(kind: tuple[str, str]) -> Any:
    library, name = kind
    return getattr(diffusers if library == "diffusers" else transformers, name)


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def single_file_tensors(
    model: Any, config: Mapping[str, Any], tensors: dict[str, torch.Tensor], files: list[Path]
) -> dict[str, torch.Tensor]:
    """`tensors` under `model`'s keys: as they are if most are its keys, else by diffusers' converter for it.

    From a file with a whole pipeline (ComfyUI's) only the diffusion model is taken.
    Raises ValueError, naming the files, if the converter finds a key missing, or there is none.
    """
    if any(key.startswith(COMFY_PREFIX) for key in tensors):
        tensors = {k.removeprefix(COMFY_PREFIX): v for k, v in tensors.items() if k.startswith(COMFY_PREFIX)}
    if 2 * len(tensors.keys() & model.state_dict().keys()) > len(tensors):
        return tensors
    converter = SINGLE_FILE_LOADABLE_CLASSES.get(type(model).__name__)
    if converter is None:
        raise ValueError(
            f"{files[0]} has not the keys of a {type(model).__name__}, for which diffusers has no converter; "
            f"give the file in diffusers' layout"
        )
    convert = converter["checkpoint_mapping_fn"]
    return read_keys(tensors, files, lambda: convert(checkpoint=dict(tensors), config=dict(config)))


def _index(folder: Path) -> dict[str, Any]:
    path = folder / "model_index.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist, and {folder} is no original Wan folder; check the path")
    return json.loads(path.read_text(encoding="utf-8"))
