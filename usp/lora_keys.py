"""Which keys of a LoRA file have a place in a model, and which diffusers would leave out without a word."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

SHOWN = 3  # keys that a message names
KEY = re.compile(r"^(?P<module>.+?)\.(?P<rest>(?:lora|lokr)_?.*)$")
HALF = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
RAW_PAIR = re.compile(r"[._](?:lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)\b.*$")
RAW_REST = re.compile(r"\.(?:diff|diff_b|alpha|dora_scale|bias|weight)$")


def read_known(read: Callable[[Any], Any], source: Any, file: Path | None) -> tuple[Any, list[str]]:
    """What diffusers makes of a source, and the keys of the source that it has no place for.

    Its converters of other layouts end with an error that lists the keys they do not know, and drop some
    others without a word. Those listed are left out; those dropped are found by leaving modules without a
    pair of matrices out, one at a time.
    """
    left: list[str] = []
    try:
        out = read(source)
    except ValueError as error:
        raw = _raw(source, file)
        left = [key for key in raw if any(f"'{tail}'" in str(error) for tail in _tails(key))]
        if not left:
            raise
        source = {key: value for key, value in raw.items() if key not in left}
        out = read(source)
    state = out[0] if isinstance(out, tuple) else out
    return out, left + _dropped(read, _raw(source, file), state)


def _dropped(read: Callable[[Any], Any], raw: dict[str, torch.Tensor], state: dict[str, Any]) -> list[str]:
    """The keys of `raw` that a converter dropped: without them it gives the same keys."""
    if not raw.keys() - state.keys():
        return []
    light = {key: value.to("meta") if value.numel() > 1 else value for key, value in raw.items()}
    paired = {RAW_PAIR.sub("", key) for key in raw if RAW_PAIR.search(key)}
    loose = [key for key in raw if not RAW_PAIR.search(key) and RAW_REST.sub("", key) not in paired]

    def needed(key: str) -> bool:
        try:
            out = read({k: v for k, v in light.items() if k != key})
        except LookupError:
            return True
        return (out[0] if isinstance(out, tuple) else out).keys() != state.keys()

    return [key for key in loose if not needed(key)]


def fitting(
    state: dict[str, torch.Tensor], models: dict[str, nn.Module]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The entries of a converted LoRA that name a module, and the keys of those that do not.

    Keys are "component.module.lora_A.weight" and the like. One matrix of a pair without the other matches
    nothing. Entries of other forms, which diffusers converts later, are kept.
    """
    modules = {part: {name for name, _ in model.named_modules()} for part, model in models.items()}
    weights = {part: {name for name, _ in model.named_parameters()} for part, model in models.items()}
    sides: dict[str, set[str]] = {}
    for key in state:
        if half := HALF.match(key):
            sides.setdefault(half["module"], set()).add(half["side"])
    kept, unmatched = {}, []
    for key, value in state.items():
        part, _, rest = key.partition(".")
        parsed = KEY.match(rest)
        half = sides.get(f"{part}.{parsed['module']}") if parsed else None
        if parsed:
            fits = parsed["module"] in modules.get(part, ()) and half in (None, {"A", "B"})
        else:  # a form that is converted later, or a whole weight beside the LoRA
            fits = part in modules and ("lora" in rest or rest in weights[part])
        if fits:
            kept[key] = value
        else:
            unmatched.append(key)
    return kept, unmatched


def _raw(source: Any, file: Path | None) -> dict[str, torch.Tensor]:
    """The entries of a source as they are, or none where only diffusers can find it."""
    if isinstance(source, dict):
        return source
    if file is None:
        return {}
    with safe_open(file, framework="pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  not a dict


def _tails(key: str) -> list[str]:
    """A key without the prefixes that layouts have."""
    return [key, key.removeprefix("diffusion_model."), key.removeprefix("lora_unet_")]


def some(keys: Sequence[str]) -> str:
    """The first few keys, for a message."""
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(repr(key) for key in keys[:SHOWN]) + more
