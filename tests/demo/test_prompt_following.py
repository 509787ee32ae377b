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


@pytest.mark.parametrize(
    ("word", "least"), [("colour", 0.9), ("direction", 0.9), ("background", 0.9), ("shape", 0.8)]
)
@pytest.mark.parametrize("kind", ["seen", "held out"])
def test_generated_clips_follow_their_prompt(videos: list, kind: str, word: str, least: float) -> None:
    """At least `least` of 12 clips show what was asked."""
    share = slice(0, 12) if kind == "seen" else slice(12, 24)
    rates = measure.following_rates(videos[share], COMBINATIONS[share])
    assert rates[word] >= least, rates
