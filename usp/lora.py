"""LoRA files: checked before any weights are read, loaded alike on all ranks, and told what they matched.

diffusers converts the keys and peft does the work; what is here is what those two leave silent.
"""

import inspect
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from runtime.log import get_logger
from runtime.process_group import World
from usp.agreement import fingerprint_tensors
from usp.lora_keys import fitting, read_known, some

logger = get_logger(__name__)

PARTS = ("transformer", "transformer_2")  # the two experts of Wan 2.2
WEIGHTS = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """A local LoRA file, its strength, and the one expert it is for; None: all that the model has."""

    path: Path
    scale: float = 1.0
    part: str | None = None


def parse_lora(text: str) -> LoraFile:
    """What "[PART=]FILE[:SCALE]" names, for example "transformer_2=low.safetensors:0.8".

    A colon is part of the path where a path separator or ".safetensors" comes after it, as in
    "C:\\loras\\a.safetensors". Raises ValueError for a strength that is not a number.
    """
    part, name = None, text
    for known in PARTS:
        if text.startswith(f"{known}="):
            part, name = known, text.removeprefix(f"{known}=")
    path, colon, tail = name.rpartition(":")
    if not colon or "/" in tail or "\\" in tail or tail.lower().endswith(WEIGHTS):
        path, tail = name, "1"
    try:
        scale = float(tail)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale) or not path:
        raise ValueError(
            f"lora {text!r} was given; {tail!r} is not a number, or no file stands before it; write "
            f"FILE{WEIGHTS} or FILE{WEIGHTS}:SCALE, for example style{WEIGHTS}:0.8"
        )
    return LoraFile(path=Path(path).expanduser(), scale=scale, part=part)


def check_file(path: Path) -> None:
    """Raise ValueError, naming the path, unless a LoRA can be read from it; reads the header only."""
    if path.is_dir():
        raise ValueError(f"lora {str(path)!r} is a folder; name the {WEIGHTS} file in it")
    if not path.is_file():
        raise ValueError(f"lora {str(path)!r} does not exist here; check the path")
    try:
        with safe_open(path, framework="pt") as opened:
            keys = list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"lora {str(path)!r} is not a safetensors file ({error}); convert it, or download it again"
        ) from error
    if not any("lora" in key or "lokr" in key for key in keys):
        first = f"its first key is {keys[0]!r}" if keys else "it holds no keys"
        raise ValueError(f"lora {str(path)!r} holds no LoRA weights: {first}; check the file")


def check_fits(pipeline: Any, models: Mapping[str, Any], files: Sequence[LoraFile]) -> None:
    """Raise ValueError unless each file names modules of these models of a pipeline of class `pipeline`.

    `models` has by name what the class takes a LoRA for; their weights may be on the meta device. So a file
    for another model is told before any weights are read.
    """
    config = {"unet_config": models["unet"].config} if "unet" in models else {}  # as the pipeline passes it
    for file in files:
        _check_takes_lora(pipeline, pipeline.__name__)
        for part in _parts(pipeline.__name__, models, file):
            second = part == "transformer_2"
            seen = _seen(pipeline.__name__, models, str(file.path), second=second)
            with _telling_of_the_source(pipeline.__name__, seen):
                _read_fitting(partial(pipeline.lora_state_dict, **config), str(file.path), file.path, seen)


def load_loras(pipeline: Any, files: Sequence[LoraFile], world: World) -> list[str]:
    """Load the files into the experts that they name and put all in force; returns the adapters' names.

    Collective. Raises ValueError, on all ranks, as `load_lora` does.
    """
    names: list[str] = []
    for file in files:
        stem = re.sub(r"\W+", "_", file.path.stem) or "lora"
        count = sum(name == stem or re.fullmatch(rf"{stem}_\d+", name) is not None for name in names)
        names.append(f"{stem}_{count + 1}" if count else stem)
        for part in _parts(type(pipeline).__name__, _models(pipeline), file):
            into = {"load_into_transformer_2": True} if part == "transformer_2" else {}
            load_lora(pipeline, world, str(file.path), adapter_name=names[-1], **into)
    if names:
        pipeline.set_adapters(names, [file.scale for file in files])
    return names


def _parts(pipeline: str, models: Mapping[str, Any], file: LoraFile) -> list[str | None]:
    """The experts that a file goes to; [None]: the pipeline has no choice to make."""
    experts = [part for part in PARTS if part in models]
    if file.part is not None and file.part not in experts:
        raise ValueError(
            f"lora {str(file.path)!r} is for {file.part}, which this {pipeline} has "
            f"not; it has {', '.join(experts) or 'one model'}; leave the part out"
        )
    return [file.part] if file.part else [*experts] or [None]


def load_lora(pipeline: Any, world: World, *args: Any, **kwargs: Any) -> None:
    """The pipeline's `load_lora_weights`, on all ranks alike or on none.

    Keys that match no module are left out and told of in one warning. Collective: the ranks compare what they
    have loaded. Raises ValueError, on all ranks, with nothing loaded, if no key matches, the file cannot be
    read or does not fit, or the ranks' files differ.
    """
    what = "the LoRA that was loaded"
    before = _Adapters(pipeline)
    try:
        seen = _load(pipeline, *args, **kwargs)
    except Exception as error:
        before.restore()
        world.agree(f"{type(error).__name__}: {error}", what)
        raise
    try:
        names, digest = _Adapters(pipeline).names, fingerprint_tensors(seen.kept.items())
        world.agree((names, f"{seen.matched} keys matched", seen.unmatched, digest), what)
    except BaseException:
        before.restore()
        raise
    if world.is_main:
        seen.tell()


def _load(pipeline: Any, *args: Any, **kwargs: Any) -> "_Seen":
    """Load on this rank. Whatever goes wrong is a ValueError that names the source."""
    name = type(pipeline).__name__
    _check_takes_lora(pipeline, name)
    bound = inspect.signature(pipeline.load_lora_weights).bind(*args, **kwargs)
    source = next(iter(bound.arguments.values()))
    file = _local_file(source, kwargs)
    if file is not None:
        check_file(file)
    said = "from a dict" if isinstance(source, dict) else str(source)
    seen = _seen(name, _models(pipeline), said, second=bool(kwargs.get("load_into_transformer_2")))
    with (
        _telling_of_the_source(name, seen),
        _observed(pipeline, seen, file),
        _unmatched_keys_told_once(),
    ):
        pipeline.load_lora_weights(*args, **kwargs)
    if not any(True for model in seen.models.values() for _ in _tuner_layers(model)):
        raise ValueError(f"lora {seen.name}: none of its keys matches {', '.join(sorted(seen.models))}")
    return seen


def _check_takes_lora(pipeline: Any, name: str) -> None:
    if not hasattr(pipeline, "load_lora_weights"):
        raise ValueError(f"{name} takes no LoRA; leave it out")


@contextmanager
def _telling_of_the_source(pipeline: str, seen: "_Seen") -> Iterator[None]:
    """Whatever goes wrong in the body is a ValueError that names the source."""
    try:
        yield
    except (RuntimeError, LookupError, TypeError, AttributeError, OSError, ValueError) as error:
        if seen.refused:
            raise
        told = [line.strip() for line in str(error).splitlines() if "mismatch" in line] or [str(error)]
        raise ValueError(
            f"lora {seen.name} does not fit {pipeline}: {type(error).__name__}: {told[0]}"
        ) from error


@dataclass
class _Seen:
    """What passed through one load."""

    name: str
    models: dict[str, Any]  # by the prefix that keys have
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    other_names: dict[str, str] = field(default_factory=dict)  # of components, where keys say another
    refused: bool = False  # the error is our own sentence

    @property
    def matched(self) -> int:
        """How many entries of the file, as diffusers converts them, have a place."""
        return len(self.kept)

    def tell(self) -> None:
        """One line on what the load did."""
        parts = {key.split(".")[0] for key in self.kept}
        into = ", ".join(sorted(self.other_names.get(part, part) for part in parts))
        counts = f"lora {self.name}: {self.matched} keys matched in {into}, {len(self.unmatched)} unmatched"
        if self.unmatched:
            logger.warning("%s, which have no effect: %s", counts, some(self.unmatched))
        else:
            logger.info(counts)


def _seen(pipeline: str, models: Mapping[str, Any], source: str, *, second: bool) -> _Seen:
    """What a load into these models, or into the `second` of two experts, is to look at."""
    looked_at = dict(models)
    other = looked_at.pop("transformer_2", None)  # its keys say "transformer" too
    if other is not None and "transformer" not in looked_at:
        raise ValueError(
            f"this {pipeline} has transformer_2 and no transformer; diffusers loads a LoRA "
            "only where both are; merge it into the weights before"
        )
    seen = _Seen(name=source, models=looked_at)
    if second and other is not None:
        looked_at["transformer"] = other
        seen.other_names["transformer"] = "transformer_2"
    return seen


def _read_fitting(read: Any, source: Any, file: Path | None, seen: _Seen) -> Any:
    """What `read` makes of a source, less the keys that fit no module; `seen` has both."""
    out, left = read_known(read, source, file)
    state, *rest = out if isinstance(out, tuple) else (out,)
    seen.kept, unmatched = fitting(state, seen.models)
    seen.unmatched = [*left, *unmatched]
    if not seen.kept:
        seen.refused = True
        raise ValueError(
            f"lora {seen.name}: none of its {len(seen.unmatched)} keys matches a module of "
            f"{', '.join(sorted(seen.models))}; its keys are {some(seen.unmatched)}; it is for another "
            "model"
        )
    return (seen.kept, *rest) if isinstance(out, tuple) else seen.kept


@contextmanager
def _observed(pipeline: Any, seen: _Seen, file: Path | None) -> Iterator[None]:
    """Stand between the pipeline's reading of a file and its use: only keys that fit a module go on."""
    read = pipeline.lora_state_dict

    def lora_state_dict(source: Any, *args: Any, **kwargs: Any) -> Any:
        return _read_fitting(partial(read, *args, **kwargs), source, file, seen)

    pipeline.lora_state_dict = lora_state_dict
    try:
        yield
    finally:
        del pipeline.lora_state_dict


class _Adapters:
    """The adapters of a pipeline and their settings, to go back to."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.names = pipeline.get_list_adapters() if hasattr(pipeline, "get_list_adapters") else {}
        self._layers = [
            (layer, list(layer.active_adapters), dict(layer.scaling))
            for model in _models(pipeline).values()
            for layer in _tuner_layers(model)
        ]

    def restore(self) -> None:
        """Take off what was loaded since, and put in force what was in force."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft tells which adapter is in force now
            for part, model in _models(self._pipeline).items():
                if self.names.get(part):
                    for name in set(getattr(model, "peft_config", ())) - set(self.names[part]):
                        model.delete_adapters(name)
                elif any(True for _ in _tuner_layers(model)):
                    _unload(self._pipeline, part)
        for layer, active, scaling in self._layers:
            layer.set_adapter(active)
            layer.scaling.update(scaling)


def _unload(pipeline: Any, part: str) -> None:
    """The pipeline's own unloading, of one component."""
    parts = pipeline._lora_loadable_modules
    pipeline._lora_loadable_modules = [part]
    try:
        pipeline.unload_lora_weights()
    finally:
        del pipeline._lora_loadable_modules
        assert pipeline._lora_loadable_modules == parts, "it is the class's again"


@contextmanager
def strengths_kept(pipeline: Any) -> Iterator[None]:
    """A pipeline's adapters have after the body the strengths that they had before.

    diffusers multiplies them for a forward that is given a `scale` and divides afterwards, which may round;
    after a `scale` of 0 it sets them to 1 (0.42.1).
    """
    models = _models(pipeline).values()
    kept = [(layer, dict(layer.scaling)) for model in models for layer in _tuner_layers(model)]
    try:
        yield
    finally:
        for layer, scaling in kept:
            layer.scaling.update({n: s for n, s in scaling.items() if n in layer.scaling})


def _tuner_layers(model: nn.Module) -> Iterator[Any]:
    return (m for m in model.modules() if isinstance(getattr(m, "scaling", None), dict))


def _models(pipeline: Any) -> dict[str, Any]:
    """The components that take a LoRA and are there, by name."""
    names = getattr(pipeline, "_lora_loadable_modules", ())
    found = {name: getattr(pipeline, name, None) for name in names}
    return {name: model for name, model in found.items() if model is not None}


def _local_file(source: Any, kwargs: dict[str, Any]) -> Path | None:
    """The safetensors file here that a source names, or None: a dict, a hub name, another kind of file."""
    if isinstance(source, dict):
        return None
    path = Path(source, kwargs.get("subfolder") or "", kwargs.get("weight_name") or "")
    is_local = Path(source).suffix == WEIGHTS or Path(source).exists()
    return path if is_local and path.suffix == WEIGHTS else None


@contextmanager
def _unmatched_keys_told_once() -> Iterator[None]:
    """We tell of keys ourselves, on one rank; peft's and diffusers' own words on them are left out."""
    loader = logging.getLogger("diffusers.loaders.peft")
    level = loader.level
    loader.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            yield
    finally:
        loader.setLevel(level)
