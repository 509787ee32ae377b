"""What the bundled model draws follows its prompt, measured from pixels, for unseen combinations as well."""

import random

import pytest
import torch
from diffusers import WanPipeline

from usp.demo import DEFAULTS, MODEL_DIR, clips, measure

SEEN = random.Random(2).sample(clips.seen_combinations(), 12)
COMBINATIONS = [*SEEN, *clips.HELD_OUT[1::2][:12]]


@pytest.fixture(scope="module")
def videos() -> list:
    """One generated clip per combination, at the demo's defaults, each from its own seed."""
    pipeline = WanPipeline.from_pretrained(MODEL_DIR).to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return list(
        pipeline(
            [clips.plain_caption(*combination) for combination in COMBINATIONS],
            height=DEFAULTS.height,
            width=DEFAULTS.width,
            num_frames=DEFAULTS.num_frames,
            num_inference_steps=DEFAULTS.num_inference_steps,
            guidance_scale=DEFAULTS.guidance_scale,
            generator=[torch.Generator().manual_seed(100 + i) for i in range(len(COMBINATIONS))],
        ).frames
    )


# Measured on 52 clips each: 1.00 for every word but shape (seen 0.98, held out 0.90). Seeds are
# fixed, but arithmetic differs between machines, so each bound leaves room for clips that turn out otherwise:
# 2 of 24 or of 12 in colour, direction and background, 4 of 24 or 3 of 12 in shape.
@pytest.mark.parametrize("word", ["colour", "direction", "background", "shape"])
@pytest.mark.parametrize(
    ("first", "least", "least_shape"), [(0, 0.9, 0.8), (12, 0.8, 0.75)], ids=["all", "held out"]
)
def test_generated_clips_follow_their_prompt(
    videos: list, first: int, least: float, least_shape: float, word: str
) -> None:
    """The share of clips that show the word asked for is at least `least`, from clip `first` on."""
    rates = measure.following_rates(videos[first:], COMBINATIONS[first:])
    assert rates[word] >= (least_shape if word == "shape" else least), rates
