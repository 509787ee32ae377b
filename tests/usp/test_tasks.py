"""A task's name and the user's words become one settled request, or one sentence."""

import re
from pathlib import Path

import pytest
import torch

from runtime.device import Device
from runtime.process_group import World
from usp.config import ParallelConfig
from usp.demo import DEFAULTS, MODEL_DIR
from usp.job import load, prepare
from usp.options import JobOptions
from usp.tasks import DTYPES, WAN_T2V, Request, choose_dtype, model_path, parse_weights, settle

NAMES = ("width", "height", "num_frames", "num_inference_steps", "guidance_scale", "fps")
GIVEN = {"prompt": "a cat", "negative_prompt": "a dog", "num_frames": 5, "fps": 30}
GIVEN |= {"num_inference_steps": 7, "guidance_scale": 1.5}


@pytest.mark.parametrize(("bundled", "defaults"), [(True, DEFAULTS), (False, WAN_T2V)])
def test_what_is_not_given_is_the_models_or_the_tasks(bundled, defaults):
    """The bundled model brings its own size, steps and guidance; another gets the task's."""
    request = settle(WAN_T2V, bundled=bundled, size=None, prompt="a cat")
    assert {name: getattr(request, name) for name in NAMES} == {
        name: getattr(defaults, name) for name in NAMES
    }
    assert (request.prompt, request.negative_prompt) == ("a cat", None)


@pytest.mark.parametrize("bundled", [True, False])
def test_what_is_given_wins(bundled):
    """Each value reaches the pipeline's call under its own name; fps is for the file only."""
    request = settle(WAN_T2V, bundled=bundled, size="48x32", **GIVEN)
    assert request == Request(width=48, height=32, **GIVEN)
    expected = {**GIVEN, "width": 48, "height": 32}
    del expected["fps"]
    assert request.call_arguments() == expected


def test_a_guidance_of_0_is_given():
    """0 is a value, not "not given"."""
    assert settle(WAN_T2V, bundled=True, size=None, guidance_scale=0.0).guidance_scale == 0.0


@pytest.mark.parametrize("size", ["48x32", "48X32"])
def test_sizes_are_width_by_height(size):
    """Width first, as in 832x480."""
    request = settle(WAN_T2V, bundled=True, size=size)
    assert (request.width, request.height) == (48, 32)


@pytest.mark.parametrize(
    "size", ["112", "112x", "x112", "112x112x3", "112*112", "-16x16", "1.5x16", "axb", "", "²x²"]
)
def test_a_size_that_is_none_is_refused(size):
    """The form is shown by example."""
    message = f"size {size!r} was given; write WIDTHxHEIGHT in pixels, for example 832x480"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        settle(WAN_T2V, bundled=True, size=size)


def test_the_prompt_may_be_left_out_for_the_demo_only():
    """The demo has its own; elsewhere the option is named."""
    assert settle(WAN_T2V, bundled=True, size=None).prompt == DEFAULTS.prompt
    with pytest.raises(
        ValueError, match=r"^no prompt was given; say what the video shall show with --prompt$"
    ):
        settle(WAN_T2V, bundled=False, size=None)


@pytest.mark.parametrize(("name", "value", "message"), [
    ("num_inference_steps", 0, "num inference steps 0 was asked for; use 1 or more"),
    ("num_inference_steps", -3, "num inference steps -3 was asked for; use 1 or more"),
    ("fps", 0, "fps 0 was asked for; use 1 or more"),
    ("fps", -8, "fps -8 was asked for; use 1 or more"),
])  # fmt: skip
def test_a_count_below_1_is_refused(name, value, message):
    """Name, value and bound."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        settle(WAN_T2V, bundled=True, size=None, **{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_guidance_that_is_no_number_is_refused(value):
    """NaN would turn guidance off in silence, infinity would make every pixel NaN: a black video."""
    with pytest.raises(ValueError, match=r"guidance scale (nan|-?inf) was asked for"):
        settle(WAN_T2V, bundled=True, size=None, guidance_scale=value)


def test_a_model_is_the_demo_a_folder_or_a_hub_name(tmp_path, monkeypatch):
    """None is the demo; a folder here is taken, also one that looks like a hub name; ~ is the home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "wan").mkdir(parents=True)
    assert model_path(None) == MODEL_DIR
    assert model_path("models") == Path("models")
    assert model_path("models/wan") == Path("models/wan")
    assert model_path(str(tmp_path / "models")) == tmp_path / "models"
    assert model_path("~/models") == tmp_path / "models"
    assert model_path("Wan-AI/Wan2.1-T2V-1.3B-Diffusers") is None


@pytest.mark.parametrize(
    "name", ["nowhere", "/no/where", "/nowhere", "./no/where", "../nowhere", "~/nowhere", "a/b/c"]
)
def test_a_path_that_is_not_there_is_refused(tmp_path, monkeypatch, name):
    """What cannot be a hub name is told at once, without asking any hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    message = f"model {name!r} does not exist here; give a diffusers folder, or a hub name like owner/name"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model_path(name)


@pytest.mark.parametrize(("name", "kind", "dtype"), [
    ("auto", "cpu", torch.float32),
    ("auto", "cuda", torch.bfloat16),
    ("auto", "npu", torch.bfloat16),
    ("fp32", "cuda", torch.float32),
    ("bf16", "cpu", torch.bfloat16),
    ("fp16", "npu", torch.float16),
])  # fmt: skip
def test_dtypes_have_short_names(name, kind, dtype):
    """A name means the same on every device; auto is fp32 on cpu and bf16 elsewhere."""
    assert choose_dtype(name, Device(kind, None if kind == "cpu" else 0)) == dtype


@pytest.mark.parametrize("name", ["int8", "float32", "FP32", ""])
def test_an_unknown_dtype_is_refused(name):
    """The names that are known follow."""
    message = f"dtype {name!r} is not known; use auto or one of {', '.join(DTYPES)}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose_dtype(name, Device("cpu"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_vae_stays_in_fp32(dtype):
    """Wan's VAE loses contrast in half precision; the other parts take the dtype that was asked for."""
    job = prepare(WAN_T2V, JobOptions(dtype=dtype, device="cpu"))
    pipeline, config = load(job, World(0, 1, 0, job.device))
    assert config == ParallelConfig()
    assert pipeline.vae.dtype == torch.float32
    assert pipeline.transformer.proj_out.weight.dtype == DTYPES[dtype]
    assert pipeline.text_encoder.dtype == DTYPES[dtype]


def test_weights_are_named_by_component():
    """Each once; a path may hold "=" and "~"; anything else is refused in one sentence."""
    found = parse_weights(["transformer=a/b=c.safetensors", "vae=x*.safetensors"])
    assert found == {"transformer": Path("a/b=c.safetensors"), "vae": Path("x*.safetensors")}
    for wrong in (["file.safetensors"], ["=x"], ["vae="], ["vae=a", "vae=b"], ["a b=c"]):
        with pytest.raises(ValueError, match="were given; write each component once, as COMPONENT=FILE"):
            parse_weights(wrong)


@pytest.mark.parametrize(("text", "message"), [
    ("transformer=nowhere/*.safetensors", r"nowhere/\*.safetensors is no checkpoint file here"),
    ("foo=x.safetensors", r"weights of 'foo' were given; .*model_index.json names no such component"),
    ("tokenizer=x.safetensors", "x.safetensors was given for tokenizer, a "),
])  # fmt: skip
def test_weights_are_checked_before_any_are_read(text, message):
    """A file that is not there, and a component that takes none."""
    options = JobOptions(weights=[text], device="cpu")
    with pytest.raises(ValueError, match=f"^{message}"):
        prepare(WAN_T2V, options)
