"""The bundled demo: a tiny Wan text-to-video pipeline, trained on moving shapes by `usp.demo.train`.

Importing this package imports neither torch nor diffusers.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from usp.demo.clips import WORDS

MODEL_DIR = Path(__file__).parent / "model"


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The call arguments that the bundled model was measured with; `fps` is for writing the film."""

    prompt: str = "a red circle moving right on a blue background"
    height: int = 112
    width: int = 112
    num_frames: int = 17
    num_inference_steps: int = 15
    guidance_scale: float = 2.5
    fps: int = 8


DEFAULTS = Defaults()


def unknown_words(prompt: str) -> list[str]:
    """The words of `prompt` that the demo model has never seen, lower case, in order, each once."""
    words = re.sub(r"\bgray\b", "grey", prompt.lower())
    return list(dict.fromkeys(word for word in re.findall(r"[^\W_]+", words) if word not in WORDS))
