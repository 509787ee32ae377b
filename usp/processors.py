"""Qwen's processor of text and images where torchvision is missing.

transformers 5 gives Qwen2VLProcessor a video part that needs torchvision, and cannot load the processor
without, though no image pipeline uses that part. torch builds of many devices have no torchvision that fits.
"""

import json
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import is_torchvision_available


class _WithoutVideo(transformers.Qwen2VLProcessor):
    """The same text and images in, the same tensors out. The parts are read off this signature."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)


# A folder that is saved with it names the library's class, so that it is an ordinary one.
_WithoutVideo.__name__ = transformers.Qwen2VLProcessor.__name__
_WithoutVideo.__module__ = transformers.Qwen2VLProcessor.__module__


def qwen_processor_class() -> type[transformers.Qwen2VLProcessor]:
    """The library's class where torchvision is installed, else one without the video part."""
    return transformers.Qwen2VLProcessor if is_torchvision_available() else _WithoutVideo


def parts_without_torchvision(folder: Path) -> dict[str, Any]:
    """What to hand to `from_pretrained(folder, **parts)` so that the pipeline loads without torchvision too.

    Empty if torchvision is installed, or nothing in this diffusers folder asks for it.
    """
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    wanted = [name for name, kind in index.items() if kind == ["transformers", "Qwen2VLProcessor"]]
    if is_torchvision_available():
        return {}
    return {name: _WithoutVideo.from_pretrained(folder / name, local_files_only=True) for name in wanted}
