"""One model of a pipeline: made without weights, then filled from files as its library would have it."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import accelerate
import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from runtime.device import Device
from runtime.loading import LoadReport, check_tensors, load_module

Model = TypeVar("Model", bound=nn.Module)


def empty_model(cls: type[Model], config: Mapping[str, Any], dtype: torch.dtype) -> Model:
    """A model of diffusers or transformers whose parameters are on the meta device.

    Buffers that are in no file are real, as `from_pretrained` in `dtype` makes them.
    """
    factory: Any = cls
    with _default_dtype(dtype), accelerate.init_empty_weights():
        if issubclass(cls, ModelMixin):
            return factory.from_config(dict(config))
        model = factory(factory.config_class(**config))
    model.tie_weights()  # the context above made copies of tied parameters
    return model


def check_fits(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, naming file and key, unless `fill` can load `tensors` into a model from
    `empty_model`; reads no values."""
    check_tensors(model, _used(model, tensors))


def fill(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], *, device: Device, dtype: torch.dtype
) -> LoadReport:
    """Load `tensors` into a model from `empty_model` by its library's rules, and set it to inference.

    What the class keeps in fp32 stays fp32, and keys that it knows and does not use are left out.
    Raises ValueError, naming file and key, as `load_module` does.
    """
    rule = fp32_rule(model, dtype)
    report = load_module(model, _used(model, tensors), device=device, dtype=dtype, stays_fp32=rule)
    model.eval()
    return report


def _used(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors less those that the model's class knows and does not use."""
    unused = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not any(re.search(pattern, name) for pattern in unused)
    }


def fp32_rule(model: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Whether a parameter, by name, stays fp32 when the rest of `model` is in `dtype`.

    diffusers' list holds for every dtype; transformers has one for fp16 and a strict one for bf16 too.
    """
    usual = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    strict = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if not isinstance(model, ModelMixin):
        half = dtype in (torch.float16, torch.bfloat16)
        usual = (usual if dtype == torch.float16 else set()) | (strict if half else set())
    return lambda name: not usual.isdisjoint(name.split("."))


def read_keys(tensors: Mapping[str, torch.Tensor], files: list[Path], what: Callable[[], Any]) -> Any:
    """`what()`, which reads `tensors` by key; a missing key is a ValueError that names the files."""
    try:
        return what()
    except (KeyError, IndexError) as error:
        asked = f"the key {error.args[0]!r}" if isinstance(error, KeyError) else "the blocks of this model"
        names = ", ".join(str(file) for file in files[:3])
        some = next(iter(tensors), "nothing")
        raise ValueError(
            f"{names} {'has' if len(files) == 1 else 'have'} not {asked}, but keys such as {some!r}; "
            f"give the files of this kind of model"
        ) from error


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
