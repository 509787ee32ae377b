"""Every tiny pipeline is small, loads from its folder as an ordinary model, and does what it is asked."""

import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

import usp.demo.__main__
from tests.processes import loggers_kept, run_command_line
from tests.usp.families import small_references
from usp import cli
from usp.demo import tiny
from usp.demo.tiny.words import qwen_tokenizer
from usp.processors import parts_without_torchvision

NAMES = tuple(tiny.FAMILIES)
MOST_BYTES = 5e6


@cache
def built(name: str) -> Any:
    """One pipeline for all tests of a family; its random weights are not changed."""
    return tiny.build(name)


def run(pipeline: Any, name: str, *, seed: int = 0, output: str = "latent", **changes: Any) -> np.ndarray:
    """What the family's own small call makes."""
    generator = torch.Generator().manual_seed(seed)
    arguments = {**tiny.call_arguments(name), "generator": generator, "output_type": output, **changes}
    made = pipeline(**arguments)
    return np.asarray(made.frames if hasattr(made, "frames") else made.images)


@cache
def latents(name: str) -> np.ndarray:
    """The latents of the family's call with seed 0."""
    return run(built(name), name)


@pytest.fixture(autouse=True)
def _small_references() -> Iterator[None]:
    with small_references():
        yield


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_an_ordinary_model_of_its_class(name, tmp_path):
    """Saved and loaded by diffusers it is of the same classes and weights, and makes the same latents.

    To 1e-4: weights that are read from a file lie at other addresses, and the matmul library adds in an
    order that depends on them (1e-6 in one step).
    """
    assert tiny.save(name, tmp_path / "model") < MOST_BYTES
    parts = parts_without_torchvision(tmp_path / "model")
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "model", local_files_only=True, **parts)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is type(built(name))
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    for part, own in built(name).components.items():
        same = loaded.components[part]
        assert index[part][1] == (None if own is None else type(own).__name__)
        assert type(same).__name__ == type(own).__name__
        if isinstance(own, torch.nn.Module):
            assert all(map(torch.equal, same.parameters(), own.parameters()))
    assert np.allclose(run(loaded, name), latents(name), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_finite_and_not_of_one_colour(name):
    """What is decoded has a value for every pixel, and they differ."""
    pixels = run(built(name), name, output="np")
    assert np.isfinite(pixels).all()
    assert pixels.std() > 0.05


@pytest.mark.parametrize("name", NAMES)
def test_each_step_seed_and_prompt_counts(name):
    """Latents stay of order 1; another seed, prompt or negative prompt gives others, 100 tolerances away."""
    steps: list[torch.Tensor] = []

    def keep(pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        steps.append(values["latents"].clone())
        return values

    own = run(built(name), name, callback_on_step_end=keep)
    assert len(steps) >= 3
    assert all((after - before).abs().mean() > 1e-3 for before, after in pairwise(steps))
    assert 0.3 < own.std() < 10
    assert np.array_equal(own, latents(name))
    changes: list[dict[str, Any]] = [{"seed": 1}, {"prompt": "a small blue dog at night"}]
    if tiny.FAMILIES[name].negative:
        changes.append({"negative_prompt": "a dark picture"})
    for change in changes:
        assert np.abs(run(built(name), name, **change) - own).mean() > 1e-2, change


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_chooses_the_weights(name):
    """The same seed gives the same weights, another seed others in every tensor, and none is left at 0."""
    pipelines = [built(name), tiny.build(name, 0), tiny.build(name, 1)]
    for part in ("transformer", "transformer_2", "unet"):
        models: list[Any] = [getattr(pipeline, part, None) for pipeline in pipelines]
        if models[0] is None:
            continue
        for own, same, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(own, same)
            assert not torch.equal(own, other)
            assert own.count_nonzero() == own.numel()


def test_the_callers_random_state_is_kept():
    """Building draws from no generator of the caller."""
    before = torch.random.get_rng_state()
    tiny.build("sd15", 3)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("name", "dropped"), [
    ("qwen-image", 34), ("qwen-image-edit", 64), ("qwen-image-edit-plus", 64),
])  # fmt: skip
def test_the_dropped_tokens_are_exactly_the_template(name, dropped):
    """Qwen-Image's pipelines drop a fixed number of tokens: all before the prompt, and none of it."""
    pipeline = built(name)
    assert pipeline.prompt_template_encode_start_idx == dropped
    before = pipeline.prompt_template_encode.split("<|vision_start|>")[0].split("{}")[0]
    ids = pipeline.tokenizer(f"{before}a red circle").input_ids
    assert pipeline.tokenizer.decode(ids[:dropped]) == before
    assert pipeline.tokenizer.decode(ids[dropped:]) == "a red circle"


def test_hunyuan_crops_exactly_its_template():
    """HunyuanVideo's pipeline crops 95 tokens: all before the prompt, and none of it."""
    before = DEFAULT_PROMPT_TEMPLATE["template"].split("{}")[0]
    tokenizer = built("hunyuan-video").tokenizer
    ids = tokenizer(f"{before}a red circle").input_ids
    crop = DEFAULT_PROMPT_TEMPLATE["crop_start"]
    assert tokenizer.decode(ids[:crop]) == f"<|begin_of_text|>{before}"
    assert tokenizer.decode(ids[crop:]) == "a red circle"


def test_a_word_outside_the_vocabulary_is_spelled():
    """Any prompt is taken whole: unknown words in pieces, none dropped."""
    tokenizer = qwen_tokenizer()
    assert tokenizer.decode(tokenizer("a zebra, 7 Ünïcödé 猫").input_ids) == "a zebra, 7 Ünïcödé 猫"


def test_the_command_writes_a_folder(tmp_path, capsys):
    """python -m usp.demo tiny NAME DIR leaves a model and says how big it is."""
    with loggers_kept(), pytest.raises(SystemExit) as left:
        run_command_line(usp.demo.__main__, "tiny", "wan-t2v", str(tmp_path / "new" / "model"))
    assert not left.value.code
    assert capsys.readouterr().out.startswith("wan-t2v: ")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    index = json.loads((tmp_path / "new" / "model" / "model_index.json").read_text())
    assert getattr(diffusers, index["_class_name"]) is type(built("wan-t2v"))


def test_an_unknown_name_lists_the_families(tmp_path, monkeypatch, capsys):
    """One sentence, exit code 2, nothing written."""
    monkeypatch.setattr(sys, "argv", ["usp.demo", "tiny", "wan", str(tmp_path / "model")])
    with loggers_kept(), pytest.raises(SystemExit) as left:
        cli.main(usp.demo.__main__.app, "usp.demo")
    assert left.value.code == 2
    sentence = f"there is no tiny pipeline 'wan'; use one of {', '.join(NAMES)}"
    assert capsys.readouterr() == ("", f"usp.demo: error: {sentence}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path):
    """A model that is there is never mixed with another."""
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="exists and is not empty; name a new folder"):
        tiny.save("wan-t2v", tmp_path)
    assert (tmp_path / "model_index.json").read_text() == "{}"
