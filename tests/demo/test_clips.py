"""The clips, their captions, and that measuring them reads back what was drawn."""

import random

import numpy as np
import pytest

from usp.demo import clips, measure, unknown_words

DRAWN = [
    clips.draw_clip(random.Random(f"test-{i}"), combination)
    for i, combination in enumerate(clips.combinations()[::2])
]


def test_held_out_combinations_exist_and_are_never_drawn_for_training() -> None:
    """What is called held out is a real combination, listed once, and training never draws it."""
    assert len(set(clips.HELD_OUT)) == len(clips.HELD_OUT)
    assert set(clips.HELD_OUT) <= set(clips.combinations())
    assert not set(clips.HELD_OUT) & set(clips.seen_combinations())
    assert {clips.draw_clip(random.Random(i)).combination for i in range(2000)} <= set(
        clips.seen_combinations()
    )


def test_every_word_stays_seen_in_training() -> None:
    """A held-out combination is new only as a combination: each pair of its words is seen in training."""
    seen = clips.seen_combinations()
    for held_out in clips.HELD_OUT:
        for i in range(4):
            for j in range(i):
                assert any(other[i] == held_out[i] and other[j] == held_out[j] for other in seen)


def test_shape_stays_inside_the_frame() -> None:
    """The border of every drawn clip is background in all frames."""
    for clip in DRAWN[::5]:
        mask = measure.shape_mask(clips.render(clip))
        assert not mask[:, [0, -1]].any(), clip
        assert not mask[:, :, [0, -1]].any(), clip


def test_measure_reads_back_what_was_rendered() -> None:
    """Every combination, at every size, is recognised in all four words."""
    for clip in DRAWN:
        assert tuple(measure.describe(clips.render(clip)).values()) == clip.combination, clip


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda frames: frames[::-1], "direction"),
        (lambda frames: np.repeat(frames[:1], len(frames), axis=0), "direction"),
        (lambda frames: frames[:, :, :, [2, 1, 0]], "colour"),
        (lambda frames: 1.0 - frames, "background"),
        (lambda frames: frames * 0.0, "shape"),
    ],
    ids=["reversed", "still", "red and blue swapped", "negative", "empty"],
)
def test_measure_refuses_a_wrong_clip(change: object, word: str) -> None:
    """A clip that was altered in one respect no longer counts as following its prompt in that respect."""
    combination = ("red", "circle", "right", "grey")
    frames = clips.render(clips.draw_clip(random.Random(0), combination))
    if word == "background":
        combination = ("red", "circle", "right", "black")
        frames = clips.render(clips.draw_clip(random.Random(0), combination))
    assert measure.following_rates([frames], [combination])["all"] == 1.0
    rates = measure.following_rates([change(frames)], [combination])
    assert rates[word] == 0.0
    assert rates["all"] == 0.0


@pytest.mark.parametrize("wrong", clips.SHAPES)
def test_measure_tells_shapes_apart(wrong: str) -> None:
    """No shape is taken for another one, in the smallest size that captions call normal."""
    for shape in clips.SHAPES:
        clip = clips.Clip(
            colour="yellow",
            shape=shape,
            direction="up",
            background="blue",
            size=None,
            radius=13.0,
            start=(50.0, 80.0),
            travel=40.0,
        )
        assert (measure.shape_name(clips.render(clip)) == wrong) == (shape == wrong)


def test_captions_use_only_known_words_and_name_the_combination() -> None:
    """Every wording is in the vocabulary, says all that is shown, and belongs to one combination and size."""
    owner: dict[str, tuple[object, ...]] = {}
    for clip in DRAWN:
        for caption in clips.captions(clip):
            assert unknown_words(caption) == []
            assert {clip.colour, clip.shape, clip.direction} <= set(caption.split())
            assert owner.setdefault(caption, (*clip.combination, clip.size)) == (*clip.combination, clip.size)
        if clip.size is None:
            assert clips.plain_caption(*clip.combination) in clips.captions(clip)


def test_unknown_words_are_listed_once_in_order() -> None:
    """Case, punctuation and `gray` are no reason to warn; unseen words are, each once."""
    assert unknown_words("A RED circle, moving right - on a gray background.") == []
    assert unknown_words("a fluffy cat and a red cat") == ["fluffy", "cat", "and"]
