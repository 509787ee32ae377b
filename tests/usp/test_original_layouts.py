"""Folders as Wan's authors publish them: told by their files, and the same model as the diffusers folder."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from runtime.device import Device
from tests import tiny
from tests.usp import originals
from usp import original_layouts, parts
from usp.demo import MODEL_DIR
from usp.loading import load_pipeline
from usp.model_folder import read_model_folder
from usp.original_layouts import CLIP_FILE, T5_FILE, Parts, configs, detect, parts_of

CPU = Device("cpu")
FP32 = {"default": torch.float32}
KINDS = [("t2v", 1), ("i2v", 1), ("t2v", 2), ("i2v", 2), ("ti2v", 1)]
NAMES = {
    "diffusion_pytorch_model-00001-of-00002.safetensors",
    "diffusion_pytorch_model-00002-of-00002.safetensors",
    "config.json",
    T5_FILE,
    "Wan2.1_VAE.pth",
    "google/umt5-xxl/tokenizer.json",
    "assets/logo.png",
}
EXPERTS = {
    "high_noise_model/diffusion_pytorch_model.safetensors",
    "high_noise_model/config.json",
    "low_noise_model/diffusion_pytorch_model.safetensors",
    "low_noise_model/config.json",
} | {name for name in NAMES if "diffusion" not in name and name != "config.json"}


def load(folder: Path, pipeline: Any, **dtypes: torch.dtype) -> Any:
    """The pipeline of a folder, of the same class as `pipeline`."""
    name = type(pipeline).__name__
    loaded, _ = load_pipeline(folder, pipeline=name, device=CPU, dtypes={**FP32, **dtypes})
    loaded.set_progress_bar_config(disable=True)
    return loaded


def call(pipeline: Any, kind: str) -> torch.Tensor:
    """Decoded frames of a short call."""
    arguments = {"prompt": "red circle", "negative_prompt": "blue", "num_inference_steps": 2}
    arguments |= {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 3.0, "output_type": "pt"}
    if kind == "i2v":
        arguments["image"] = tiny.picture().resize((32, 32))
    length = 512 if kind == "i2v" else tiny.TEXT_LENGTH
    seed = torch.Generator().manual_seed(0)
    return pipeline(**arguments, max_sequence_length=length, generator=seed).frames


@pytest.mark.parametrize(("kind", "experts"), KINDS, ids=[f"{kind}-{n}" for kind, n in KINDS])
def test_an_original_folder_is_the_diffusers_pipeline(tmp_path, kind, experts):
    """Every weight and every frame of a call has the same bits; settings and facts are diffusers' own."""
    plain = originals.pipeline(kind, experts=experts)
    folder = originals.write_original(plain, kind, tmp_path)
    layout = detect(folder)
    assert layout is not None
    assert (layout.kind, len(layout.transformers)) == (kind, experts)
    loaded = load(folder, plain)
    assert loaded.components.keys() == plain.components.keys()
    for name, model in plain.components.items():
        if isinstance(model, torch.nn.Module):
            state, expected = getattr(loaded, name).state_dict(), model.state_dict()
            assert state.keys() == expected.keys(), name
            assert all(torch.equal(state[key], expected[key]) for key in expected), name
            assert not getattr(loaded, name).training
    assert loaded.config.get("boundary_ratio") == plain.config.get("boundary_ratio")
    assert loaded.config.expand_timesteps == plain.config.expand_timesteps
    assert torch.equal(call(loaded, kind), call(plain, kind))
    for name, config in configs(layout).items():  # what a size check needs, before weights are read
        assert {key: loaded.components[name].config[key] for key in config} == config


def test_dtypes_are_those_of_from_pretrained(tmp_path):
    """bf16 with the VAE in fp32: each parameter as diffusers and transformers have it, fp32 ones too."""
    plain = originals.pipeline("i2v")
    folder = originals.write_original(plain, "i2v", tmp_path / "original")
    plain.save_pretrained(tmp_path / "diffusers")
    dtypes = {"default": torch.bfloat16, "vae": torch.float32}
    expected = type(plain).from_pretrained(tmp_path / "diffusers", dtype=dtypes)
    loaded = load(folder, plain, **dtypes)
    for name, model in expected.components.items():
        if isinstance(model, torch.nn.Module):
            state = loaded.components[name].state_dict()
            for key, tensor in model.state_dict().items():
                assert state[key].dtype == tensor.dtype, (name, key)
                assert torch.equal(state[key], tensor), (name, key)
    assert loaded.transformer.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def t5_bias(table: torch.Tensor, length: int) -> torch.Tensor:
    """T5's relative position bias, (heads, length, length): exact up to 8, then by logarithm up to 128."""
    distance = torch.arange(length) - torch.arange(length)[:, None]
    half, exact = len(table) // 2, len(table) // 4
    log = torch.log(distance.abs().clamp(min=1) / exact) / math.log(128 / exact)
    far = (exact + log * (half - exact)).long().clamp(max=half - 1)
    bucket = torch.where(distance.abs() < exact, distance.abs(), far)
    return table[bucket + half * (distance > 0)].permute(2, 0, 1)


def test_the_t5_computes_what_its_keys_mean(tmp_path):
    """The encoder of wan/modules/t5.py, written out over the file's own keys, gives the same states."""
    w = {key: value.double() for key, value in originals.t5_keys(tiny.text_encoder().state_dict()).items()}
    plain = originals.pipeline("t2v")
    loaded = load(originals.write_original(plain, "t2v", tmp_path), plain)
    ids = torch.tensor([[3, 4, 6, 8, 10, 1, 5, 7, 9, 2, 4, 4, 3]])
    x = w["token_embedding.weight"][ids[0]]
    for i in range(2):
        b = {
            key.removeprefix(f"blocks.{i}."): value
            for key, value in w.items()
            if key.startswith(f"blocks.{i}.")
        }
        y = norm(x, b["norm1.weight"])
        q, k, v = (F.linear(y, b[f"attn.{n}.weight"]).unflatten(1, (2, 8)).transpose(0, 1) for n in "qkv")
        bias = t5_bias(b["pos_embedding.embedding.weight"], len(x))
        y = ((q @ k.mT + bias).softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + F.linear(y, b["attn.o.weight"])
        y = norm(x, b["norm2.weight"])
        gate = F.gelu(F.linear(y, b["ffn.gate.0.weight"]), approximate="tanh")
        x = x + F.linear(F.linear(y, b["ffn.fc1.weight"]) * gate, b["ffn.fc2.weight"])
    found = loaded.text_encoder(ids).last_hidden_state[0]
    assert torch.allclose(found.double(), norm(x, w["norm.weight"]), atol=1e-5)


def test_the_clip_computes_what_its_keys_mean(tmp_path):
    """The tower of wan/modules/clip.py without its last block is the states that the pipeline takes."""
    tower = originals.clip_keys(originals.image_encoder().state_dict())
    w = {key.removeprefix("visual."): value.double() for key, value in tower.items()}
    plain = originals.pipeline("i2v")
    loaded = load(originals.write_original(plain, "i2v", tmp_path), plain)
    pixels = torch.randn(1, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    x = F.conv2d(pixels.double(), w["patch_embedding.weight"], stride=8).flatten(2).mT
    x = torch.cat([w["cls_embedding"], x], 1) + w["pos_embedding"]

    def layer_norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = layer_norm(x, "pre_norm")
    block = "transformer.0"
    q, k, v = linear(layer_norm(x, f"{block}.norm1"), f"{block}.attn.to_qkv").chunk(3, -1)
    x = x + linear((q @ k.mT / math.sqrt(80)).softmax(-1) @ v, f"{block}.attn.proj")
    x = x + linear(F.gelu(linear(layer_norm(x, f"{block}.norm2"), f"{block}.mlp.0")), f"{block}.mlp.2")
    found = loaded.image_encoder(pixels, output_hidden_states=True).hidden_states[-2]
    assert torch.allclose(found.double(), x, atol=1e-5)


def test_layouts_are_told_by_names_alone():
    """One transformer, or two experts; which VAE; CLIP or not. A diffusers or foreign folder is none."""
    one = Parts(transformers={"transformer": ""}, vae_version="2.1", has_clip=False)
    assert parts_of(NAMES) == one
    assert parts_of(NAMES | {CLIP_FILE}) == Parts(**{**vars(one), "has_clip": True})
    assert parts_of(EXPERTS) == Parts(**{**vars(one), "transformers": original_layouts.EXPERTS})
    newer = {name.replace("Wan2.1", "Wan2.2") for name in NAMES}
    assert parts_of(newer) == Parts(**{**vars(one), "vae_version": "2.2"})
    assert parts_of(NAMES | {"model_index.json"}) is None
    assert parts_of({"README.md", "flux1-dev.safetensors"}) is None


@pytest.mark.parametrize(("names", "missing"), [
    (NAMES - {T5_FILE}, f"{T5_FILE} is missing"),
    (NAMES - {"Wan2.1_VAE.pth"}, "Wan2.1_VAE.pth or Wan2.2_VAE.pth is missing"),
    (NAMES - {"config.json", "google/umt5-xxl/tokenizer.json"},
     "config.json, google/umt5-xxl/tokenizer.json are missing"),
    (EXPERTS - {"low_noise_model/diffusion_pytorch_model.safetensors"},
     "low_noise_model/diffusion_pytorch_model*.safetensors is missing"),
    ({T5_FILE, "Wan2.1_VAE.pth", "config.json", "google/umt5-xxl/tokenizer.json"},
     "./diffusion_pytorch_model*.safetensors is missing"),
])  # fmt: skip
def test_a_layout_that_is_not_whole_says_what_is_there_and_what_is_not(names, missing):
    """One sentence with both lists."""
    with pytest.raises(
        ValueError, match=r"^this looks like Wan's original layout \(found: .+\), but "
    ) as caught:
        parts_of(names)
    assert f"but {missing}; download the whole model, or give a diffusers folder" in str(caught.value)
    there = T5_FILE if T5_FILE in names else "diffusion_pytorch_model*.safetensors"
    assert there in str(caught.value).split("), but")[0]


@pytest.mark.parametrize("extra", ["Wan2.2_VAE.pth", "high_noise_model/"])
def test_two_models_in_one_folder_are_refused(extra):
    """Which one is meant cannot be told, so both are named."""
    names = NAMES | {extra} if extra.endswith("pth") else NAMES | EXPERTS
    with pytest.raises(
        ValueError, match=r"^this looks like two Wan models in one folder: .* and .*; keep one"
    ):
        parts_of(names)


def spoil(folder: Path, fault: str) -> str:
    """Make one thing wrong in an original I2V folder; returns what shall be said of it."""
    config, state = json.loads((folder / "config.json").read_text()), torch.load(folder / T5_FILE)
    if fault == "kind":
        config["model_type"] = "vace"
        said = (
            f"{folder} is Wan's original 'vace' model; original folders of t2v, i2v, ti2v are read; use the"
        )
    elif fault == "no clip":
        (folder / CLIP_FILE).unlink()
        said = f"{folder} is Wan 2.1's image-to-video model, but {CLIP_FILE} is missing; download it"
    elif fault == "config":
        del config["num_heads"]
        said = f"{folder / 'config.json'} has no num_heads; it is not Wan's; download it again"
    elif fault == "layers":
        config["num_layers"] = 3
        said = "'blocks.2.scale_shift_table' is in none of them"
    elif fault == "width":
        config["ffn_dim"] = 48
        said = "key 'blocks.0.ffn.0.bias' has the shape (64,); WanTransformer3DModel's blocks.0.ffn.net"
    elif fault == "no t5 key":
        state.pop("token_embedding.weight")
        said = f"{folder / T5_FILE} has not the key 'token_embedding.weight', but keys such as"
    elif fault == "extra t5 key":
        state["blocks.0.attn.extra"] = torch.ones(1)
        key = "'blocks.0.attn.extra'"
        said = f"it has no place for {key} ({folder / T5_FILE}: key {key}; 1 such)"
    else:
        (folder / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
        said = "lists 2 files, 1 are missing, the first is"
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(state, folder / T5_FILE)
    return said


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory) -> tuple[Path, Any]:
    """An original image-to-video folder, to be copied and spoilt, and its pipeline."""
    plain = originals.pipeline("i2v")
    return originals.write_original(plain, "i2v", tmp_path_factory.mktemp("i2v")), plain


FAULTS = ["kind", "no clip", "config", "layers", "width", "no t5 key", "extra t5 key", "shard"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_in_an_original_folder_is_named(tmp_path, image_folder, fault):
    """File, and key where there is one, in one sentence."""
    folder, plain = image_folder
    said = spoil(shutil.copytree(folder, tmp_path / "copy"), fault)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is checked below
        load(tmp_path / "copy", plain)
    assert said in str(caught.value)


@pytest.mark.parametrize("index", [0, 1])
def test_every_model_is_loaded_to_the_device_of_the_rank(image_folder, monkeypatch, index):
    """B05: the loader of each is handed the device with its index, not a kind that could mean card 0."""
    devices, plain = [], parts.load_module

    def spy(*args: Any, device: Device, **kwargs: Any) -> Any:
        devices.append(device)
        return plain(*args, device=CPU, **kwargs)

    monkeypatch.setattr(parts, "load_module", spy)
    device = Device("npu", index)
    load_pipeline(image_folder[0], pipeline="WanImageToVideoPipeline", device=device, dtypes=FP32)
    assert devices == [device] * 4  # transformer, text encoder, VAE, image encoder


def test_a_folder_of_another_task_names_the_right_ones(tmp_path):
    """A text-to-video folder is not run as image to video; weights of one part are not replaced in it."""
    plain = originals.pipeline("t2v")
    originals.write_original(plain, "t2v", tmp_path)
    message = (
        r"holds Wan's original t2v model \(VAE 2.1\); this task runs a WanImageToVideoPipeline; use the task"
    )
    with pytest.raises(ValueError, match=message):
        load_pipeline(tmp_path, pipeline="WanImageToVideoPipeline", device=CPU, dtypes=FP32)
    with pytest.raises(ValueError, match=r"; transformer can be replaced in diffusers folders$"):
        load_pipeline(tmp_path, pipeline="WanPipeline", device=CPU, dtypes=FP32, files={"transformer": "x"})


def test_a_part_of_a_diffusers_folder_is_no_original():
    """Its weights are named like Wan's shards; its config has no model_type, and the index is missed."""
    assert detect(MODEL_DIR / "transformer") is None
    with pytest.raises(ValueError, match=r"model_index\.json does not exist; a diffusers pipeline"):
        read_model_folder(MODEL_DIR / "transformer", pipeline="WanPipeline")
