"""What a model folder says about itself, and what is said of one that is not whole, before any weights."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.usp.folders import FAULTS, MORE_FAULTS, change, copy_of_demo, remove
from usp.demo import DEFAULTS, MODEL_DIR
from usp.model_folder import ModelFacts, read_model_folder


def facts(**changes: object) -> ModelFacts:
    """Facts of a Wan 2.1 model, or with these changes of another."""
    wan = {"folder": Path("wan"), "pipeline": "WanPipeline", "heads": 12, "spatial_multiple": 16}
    sizes = {"temporal_factor": 4, "spatial_factor": 8, "patch_size": (1, 2, 2)}
    return ModelFacts(**{**wan, **sizes, **changes})  # type: ignore[arg-type]


def test_the_bundled_models_facts_fit_its_defaults():
    """5 heads; 112 x 112 in 17 frames is 245 tokens, odd for 2 and 4 ranks, and no multiple of 3."""
    bundled = read_model_folder(MODEL_DIR, pipeline="WanPipeline")
    size = {"width": DEFAULTS.width, "height": DEFAULTS.height, "num_frames": DEFAULTS.num_frames}
    bundled.check_size(**size)
    assert (bundled.heads, bundled.spatial_multiple, bundled.temporal_factor) == (5, 16, 4)
    assert bundled.tokens(**size) == 245


@pytest.mark.parametrize(("size", "tokens"), [
    ((832, 480, 81), 32760),  # Wan 2.1's own size: 21 x 30 x 52
    ((112, 112, 1), 49),
    ((16, 16, 5), 2),
])  # fmt: skip
def test_tokens_are_counted_as_the_transformer_does(size, tokens):
    """Latent frames x rows x columns of patches."""
    width, height, frames = size
    assert facts().tokens(width=width, height=height, num_frames=frames) == tokens


@pytest.mark.parametrize(("size", "message"), [
    ((120, 112, 17), "width 120 was asked for; this model makes multiples of 16 pixels; use 112 or 128"),
    ((112, 8, 17), "height 8 was asked for; this model makes multiples of 16 pixels; use 16 or 32"),
    ((0, 112, 17), "width 0 was asked for; this model makes multiples of 16 pixels; use 16 or 32"),
    ((112, 112, 16), "16 frames were asked for; this model makes 1 more than a multiple of 4; use 13 or 17"),
    ((112, 112, 0), "0 frames were asked for; this model makes 1 more than a multiple of 4; use 1 or 5"),
    ((112, 112, -7), "-7 frames were asked for; this model makes 1 more than a multiple of 4; use 1 or 5"),
])  # fmt: skip
def test_a_size_that_the_model_cannot_make_names_the_nearest(size, message):
    """Point 9: what was asked, what is so, what to do."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        facts().check_size(width=size[0], height=size[1], num_frames=size[2])


@given(st.integers(-40, 300), st.integers(-40, 300), st.integers(-40, 300))
def test_the_sizes_that_a_refusal_names_are_taken(width, height, frames):
    """Whatever is asked for, the two proposals are taken, and enclose it where there are smaller sizes."""
    asked = {"width": width, "height": height, "num_frames": frames}
    for _ in asked:
        try:
            facts().check_size(**asked)
        except ValueError as error:
            name = re.match(r"width|height", str(error))
            key = name[0] if name else "num_frames"
            lower, upper = map(int, re.findall(r"use (\d+) or (\d+)$", str(error))[0])
            assert lower < asked[key] < upper or asked[key] < lower == min(16, lower)
            for proposal in (upper, lower):
                facts().check_size(**{"width": 16, "height": 16, "num_frames": 1, key: proposal})
            asked[key] = lower
    facts().check_size(**asked)


def test_a_size_beyond_the_position_table_is_refused():
    """Promise 3: the demo's table has 64 places an axis; more tokens than that fail in the first step."""
    bundled = read_model_folder(MODEL_DIR, pipeline="WanPipeline")
    bundled.check_size(width=1024, height=1024, num_frames=253)
    for size in ({"width": 1040}, {"height": 1040}, {"num_frames": 257}):
        with pytest.raises(ValueError, match=f"{next(iter(size.values()))} .*(1024|253)"):
            bundled.check_size(**{"width": 112, "height": 112, "num_frames": 17, **size})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_is_told_in_a_sentence(tmp_path, fault):
    """Point 9, "missing files": the sentence names the file and what to do."""
    folder = copy_of_demo(tmp_path / "model")
    read_model_folder(folder, pipeline="WanPipeline")  # the copy itself is sound
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises(ValueError, match="model") as caught:
        read_model_folder(folder, pipeline="WanPipeline")
    assert str(caught.value) == message.format(folder=folder)


@pytest.mark.parametrize("fault", MORE_FAULTS)
def test_a_file_that_cannot_be_meant_is_named(tmp_path, fault):
    """Point 9: also for JSON that is no model's, and for small files that loading would miss."""
    folder = copy_of_demo(tmp_path / "model")
    spoil, name = MORE_FAULTS[fault]
    spoil(folder)
    with pytest.raises(ValueError, match=re.escape(f"{folder / name}")):
        read_model_folder(folder, pipeline="WanPipeline")


def test_a_folder_that_is_none_is_refused(tmp_path):
    """The path is named."""
    with pytest.raises(
        ValueError, match="is not a folder here; give a diffusers folder or a hub name"
    ) as caught:
        read_model_folder(tmp_path / "none", pipeline="WanPipeline")
    assert str(tmp_path / "none") in str(caught.value)


def test_the_second_expert_alone_is_enough(tmp_path):
    """Requirement 30: Wan 2.2 without its high-noise expert gives its facts from transformer_2."""
    folder = copy_of_demo(tmp_path / "model")
    kind = ["diffusers", "WanTransformer3DModel"]
    change(folder / "model_index.json", transformer=[None, None], transformer_2=kind)
    (folder / "transformer").rename(folder / "transformer_2")
    change(folder / "transformer_2" / "config.json", num_attention_heads=7)
    assert read_model_folder(folder, pipeline="WanPipeline").heads == 7


def test_both_experts_must_have_their_weights(tmp_path):
    """Requirement 30: a second expert that is named is checked like the first."""
    folder = copy_of_demo(tmp_path / "model")
    change(folder / "model_index.json", transformer_2=["diffusers", "WanTransformer3DModel"])
    (folder / "transformer_2").mkdir()
    with pytest.raises(ValueError, match="transformer_2 holds no weights"):
        read_model_folder(folder, pipeline="WanPipeline")


def test_weights_in_bin_files_are_weights(tmp_path):
    """Older repositories have no safetensors."""
    folder = copy_of_demo(tmp_path / "model")
    remove(folder / "vae" / "diffusion_pytorch_model.safetensors")
    (folder / "vae" / "diffusion_pytorch_model.bin").touch()
    assert read_model_folder(folder, pipeline="WanPipeline").heads == 5


@pytest.mark.parametrize(
    ("spatial", "patch", "multiple"), [(8, 2, 16), (16, 2, 32), (8, 1, 16), (8, 3, 48), (16, 1, 16)]
)
def test_sizes_are_multiples_of_the_patch_and_of_16(tmp_path, spatial, patch, multiple):
    """The least common multiple of pixels per patch and the 16 that WanPipeline itself asks for."""
    folder = copy_of_demo(tmp_path / "model")
    change(folder / "vae" / "config.json", scale_factor_spatial=spatial)
    change(folder / "transformer" / "config.json", patch_size=[1, patch, patch])
    assert read_model_folder(folder, pipeline="WanPipeline").spatial_multiple == multiple
