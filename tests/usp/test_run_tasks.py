"""usp.run's other tasks and sources of weights, on two forked ranks: the files that one rank writes."""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import usp.run
from tests.processes import Run, forked
from tests.usp import originals
from usp.demo import MODEL_DIR, tiny
from usp.demo.tiny.pictures import picture
from usp.model_folder import read_model_folder
from usp.planner import workload_of_folder
from usp.recipes import TASKS

COMMON = ("--device", "cpu", "--seed", "3", "--steps", "2")
FILM = ("wan-t2v", *COMMON, "--size", "48x32", "--frames", "5")


def made(size: int, folder: Path, *words: str) -> tuple[Run, dict[str, Any]]:
    """A run that ends well, and the JSON of its last line."""
    folder.mkdir()
    run = forked(size, folder / "run", usp.run, *words)
    assert run.code == 0, run.text
    assert [rank.stdout for rank in run.ranks[1:]] == [""] * (size - 1)
    return run, json.loads(run.ranks[0].stdout.splitlines()[-1])


def pixels(path: str) -> np.ndarray:
    """A picture's bytes as integers that can be subtracted."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.parametrize(("task", "layout", "count"), [("sd3", "cfg2", 2), ("z-image", "ulysses2", 1)])
def test_images_are_those_of_one_rank(tmp_path, task, layout, count):
    """Point 2: as many PNGs as asked for, of the size asked for, to one grey level."""
    tiny.save(task, tmp_path / "model")
    words = (task, *COMMON, "--model", str(tmp_path / "model"), "--prompt", "a red circle")
    words += ("--size", "112x80", "--count", str(count))
    found = []
    for size, parallel in ((1, "auto"), (2, layout)):
        folder = tmp_path / f"ranks-{size}"
        out = ("--parallel", parallel, "--out", str(folder / "new" / "picture.png"))
        _, report = made(size, folder, *words, *out)
        assert (report["task"], report["width"], report["height"]) == (task, 112, 80)
        assert len(report["images"]) == count
        assert sorted(map(str, (folder / "new").iterdir())) == sorted(report["images"])
        found.append(np.stack([pixels(file) for file in report["images"]]))
    assert np.abs(found[0] - found[1]).max() <= 1
    assert found[0].std() > 1


def test_an_edit_takes_several_images(tmp_path):
    """The issue's own command: two images in, one out, shaped like the last; read before they travel."""
    tiny.save("qwen-image-edit-plus", tmp_path / "model")
    names = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for seed, name in enumerate(names):
        picture(seed).resize((96, 64)).save(name)
    words = ("qwen-image-edit", *COMMON, "--model", str(tmp_path / "model"), "--prompt", "a red circle")
    words += ("--image", str(names[0]), "--image", str(names[1]), "--out", str(tmp_path / "edit.png"))
    _, report = made(2, tmp_path / "run", *words)
    assert report["width"] / report["height"] == pytest.approx(96 / 64, rel=0.1)
    assert pixels(report["images"][0]).shape == (report["height"], report["width"], 3)


def test_lora_and_other_weights_reach_the_film(tmp_path):
    """`--lora` changes the film, scale 0 does not; `--weights` with the folder's own file neither."""
    weights = MODEL_DIR / "transformer" / "diffusion_pytorch_model.safetensors"
    state, generator = load_file(weights), torch.Generator().manual_seed(0)
    lora = {}
    for key, tensor in state.items():
        if key.endswith("attn1.to_q.weight"):
            name = f"transformer.{key.removesuffix('.weight')}"
            lora[f"{name}.lora_A.weight"] = torch.randn(2, tensor.shape[1], generator=generator)
            lora[f"{name}.lora_B.weight"] = torch.randn(tensor.shape[0], 2, generator=generator)
    save_file(lora, tmp_path / "style.safetensors")
    style = str(tmp_path / "style.safetensors")
    sheets = {}
    for name, words in {
        "base": (),
        "style": ("--lora", style),
        "none": ("--lora", f"{style}:0", "--weights", f"transformer={weights}"),
    }.items():
        out = tmp_path / name / "film.mp4"
        run, report = made(2, tmp_path / name, *FILM, "--parallel", "ulysses2", "--out", str(out), *words)
        sheets[name] = pixels(report["contact_sheet"])
        if name == "style":
            matched = f"{len(lora) // 2 * 2} keys matched in transformer, 0 unmatched"
            assert matched in run.ranks[0].stderr, run.ranks[0].stderr
    assert np.array_equal(sheets["base"], sheets["none"])
    assert np.abs(sheets["base"] - sheets["style"]).max() > 8


def test_an_original_folder_makes_a_film(tmp_path):
    """Point 5: Wan's own layout as `--model`, two experts, on two ranks; --layouts reads it too."""
    folder = originals.write_original(originals.pipeline("t2v", experts=2), "t2v", tmp_path / "wan")
    words = ("--model", str(folder), "--prompt", "red circle", "--size", "32x32")
    out = tmp_path / "made" / "film.mp4"
    _, report = made(2, tmp_path / "made", *FILM, *words, "--out", str(out))
    assert (report["frames"], report["width"]) == (5, 32)
    assert out.is_file()
    _, found = made(2, tmp_path / "seen", *FILM, *words, "--layouts")
    assert {row["parallel"] for row in found["layouts"]} >= {"cfg2", "ulysses2", "ring2"}


# Stands for a hub's package: gives the files of a folder here that the patterns name.
FAKE_HUB = """
import os, shutil
from fnmatch import fnmatch
from pathlib import Path

def snapshot_download(name, *, allow_patterns, ignore_patterns, local_files_only):
    source, target = (Path(os.environ[key]) for key in ("HUB_SOURCE", "HUB_TARGET"))
    files = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    for file in files if not local_files_only else ():
        if any(fnmatch(file, pattern) for pattern in allow_patterns):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file, target / file)
    return str(target)
"""


def with_fake_hub(folder: Path) -> None:
    """In a rank: `--hub modelscope` gives the bundled model's files."""
    os.environ |= {"HUB_SOURCE": str(MODEL_DIR), "HUB_TARGET": str(folder / "fetched")}
    sys.path.insert(0, str(folder))


def test_layouts_of_a_hubs_model_need_its_configs_alone(tmp_path):
    """`--layouts` fetches no weights, and predicts as from the whole folder; a run fetches the rest."""
    (tmp_path / "modelscope.py").write_text(FAKE_HUB)
    words = (*FILM, "--model", "owner/name", "--hub", "modelscope", "--prompt", "a red circle")
    before = partial(with_fake_hub, tmp_path)
    run = forked(2, tmp_path / "seen", usp.run, *words, "--layouts", before=before)
    assert run.code == 0, run.text
    found = json.loads(run.ranks[0].stdout.splitlines()[-1])
    assert {row["parallel"] for row in found["layouts"]} >= {"cfg2", "ulysses2", "ring2"}
    fetched = {path.name for path in (tmp_path / "fetched").rglob("*") if path.is_file()}
    assert fetched == {"model_index.json", "config.json", "scheduler_config.json", "tokenizer_config.json"}
    facts = [
        read_model_folder(folder, pipeline="WanPipeline", weights=False)
        for folder in (tmp_path / "fetched", MODEL_DIR)
    ]
    call = {"width": 48, "height": 32, "num_frames": 5, "guidance_scale": 3.0}
    seen, whole = (workload_of_folder(one, call, itemsize=4) for one in facts)
    assert seen == whole
    out = str(tmp_path / "film.mp4")
    run = forked(2, tmp_path / "made", usp.run, *words, "--parallel", "cfg2", "--out", out, before=before)
    assert run.code == 0, run.text
    assert any((tmp_path / "fetched").rglob("*.safetensors"))


def test_every_task_is_a_command():
    """One command per recipe, with its summary."""
    commands = {command.name: command.callback for command in usp.run.app.registered_commands}
    assert commands.keys() == TASKS.keys()
    assert all(commands[name].__doc__ == task.summary for name, task in TASKS.items())


@pytest.mark.parametrize(("kind", "experts"), [("t2v", 1), ("i2v", 1), ("i2v", 2), ("ti2v", 1)])
def test_an_original_folder_says_the_same_of_itself(tmp_path, kind, experts):
    """Heads, factors, patches and weights are those of the diffusers folder of the same model."""
    plain = originals.pipeline(kind, experts=experts)
    folder = originals.write_original(plain, kind, tmp_path / "original")
    plain.save_pretrained(tmp_path / "diffusers")
    name = type(plain).__name__
    own, expected = (read_model_folder(f, pipeline=name) for f in (folder, tmp_path / "diffusers"))
    assert own.max_positions == 1024  # Wan's own, which its config does not hold
    same = {"folder": expected.folder, "config": expected.config, "max_positions": expected.max_positions}
    assert replace(own, **same) == expected
    call = {"width": 64, "height": 64, "num_frames": 5, "guidance_scale": 3.0}
    works = [workload_of_folder(facts, call, itemsize=4, cached=True) for facts in (own, expected)]
    assert works[0] is not None
    assert works[1] is not None
    weights = [work.parameter_bytes for work in works]
    assert weights[0] == pytest.approx(weights[1], rel=0.2)  # .pth files count with their headers
    assert replace(works[0], parameter_bytes=weights[1]) == works[1]
    assert works[0].caches == experts
