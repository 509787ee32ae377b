"""A diffusers folder, and single files of other layouts for its transformer: the same bits as diffusers'."""

import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

from runtime.device import Device
from tests import tiny
from tests.usp import originals
from usp.demo import MODEL_DIR
from usp.loading import config_files, load_pipeline, wanted_files

CPU = Device("cpu")
FP32 = {"default": torch.float32}
FLUX_WIDTH, WIDTH = 3072, 32
TEXT, POOLED = 24, 20


def flux() -> FluxPipeline:
    """FLUX.1 with embedded guidance."""
    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    text = {"joint_attention_dim": TEXT, "pooled_projection_dim": POOLED, "axes_dims_rope": (4, 6, 6)}
    config = {**sizes, **text, "in_channels": 16, "guidance_embeds": True}
    words = {"vocab_size": len(tiny.WORDS), "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0}
    clip = {"hidden_size": POOLED, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    t5 = {"d_model": TEXT, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    vae = {"block_out_channels": (4, 4, 4, 4), "norm_num_groups": 2, "latent_channels": 4}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=tiny.seeded(lambda: FluxTransformer2DModel(**config), 1),
        vae=tiny.seeded(lambda: AutoencoderKL(**vae, **blocks, shift_factor=0.1, scaling_factor=0.4), 2),
        text_encoder=tiny.seeded(lambda: CLIPTextModel(CLIPTextConfig(**clip, **words)), 3),
        text_encoder_2=tiny.seeded(lambda: T5EncoderModel(T5Config(**t5, vocab_size=len(tiny.WORDS))), 4),
        tokenizer=tiny.tokenizer(),
        tokenizer_2=tiny.tokenizer(),
    )


def qwen() -> QwenImagePipeline:
    """Qwen-Image."""
    sizes = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": TEXT}
    config = {**sizes, "in_channels": 16, "out_channels": 4, "axes_dims_rope": (4, 6, 6)}
    words = {"vocab_size": len(tiny.WORDS), "bos_token_id": 0, "eos_token_id": 1}
    rope = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}
    shape = {"hidden_size": TEXT, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    language = {**shape, **words, "num_key_value_heads": 2, "rope_scaling": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT}
    encoder = Qwen2_5_VLConfig(text_config=language, vision_config=vision)
    vae = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    spread = {"latents_mean": [0.1] * 4, "latents_std": [1.5] * 4}
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        transformer=tiny.seeded(lambda: QwenImageTransformer2DModel(**config), 1),
        vae=tiny.seeded(lambda: AutoencoderKLQwenImage(**vae, **spread), 2),
        text_encoder=tiny.seeded(lambda: Qwen2_5_VLForConditionalGeneration(encoder), 3),
        tokenizer=tiny.tokenizer(),
    )


def picture(pipeline: Any) -> torch.Tensor:
    """The decoded picture of a short call with an embedded prompt."""
    pipeline.set_progress_bar_config(disable=True)
    seed = torch.Generator().manual_seed(0)
    prompt = {"prompt_embeds": torch.randn(1, 5, TEXT, generator=seed)}
    if isinstance(pipeline, FluxPipeline):
        prompt["pooled_prompt_embeds"] = torch.randn(1, POOLED, generator=seed)
    else:
        prompt["prompt_embeds_mask"] = torch.ones(1, 5, dtype=torch.int64)
    size = {"height": 48, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
    return pipeline(**prompt, **size, generator=seed).images


@pytest.fixture
def _narrow_flux(monkeypatch):
    """diffusers' FLUX.1 converter has the real width written into it: its split sizes are scaled to ours."""
    plain = torch.split

    def scaled(tensor: torch.Tensor, sizes: Any, dim: int = 0) -> Any:
        assert sizes == (FLUX_WIDTH, FLUX_WIDTH, FLUX_WIDTH, 4 * FLUX_WIDTH)
        return plain(tensor, [size * WIDTH // FLUX_WIDTH for size in sizes], dim)

    monkeypatch.setattr(torch, "split", scaled)


def in_comfy(state: originals.State) -> originals.State:
    """As ComfyUI stores it beside the other models of a pipeline."""
    other = {"vae.decoder.conv_in.weight": torch.ones(2), "text_encoders.t5xxl.shared.weight": torch.ones(2)}
    return {f"model.diffusion_model.{key}": value for key, value in state.items()} | other


def with_other_weights(plain: Any, folder: Path) -> Path:
    """The pipeline's diffusers folder, its transformer's weights replaced by zeros: they must not be used."""
    plain.save_pretrained(folder)
    state = {key: torch.zeros_like(value) for key, value in plain.transformer.state_dict().items()}
    save_file(state, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


@pytest.mark.usefixtures("_narrow_flux")
@pytest.mark.parametrize("comfy", [False, True], ids=["bare", "comfy"])
def test_a_flux_file_in_its_own_layout_is_the_diffusers_transformer(tmp_path, comfy):
    """Fused qkv and mlp apart, scale and shift swapped: weights and a call's picture, to the bit."""
    plain = flux()
    folder = with_other_weights(plain, tmp_path / "base")
    state = originals.flux_keys(plain.transformer.state_dict())
    assert "single_blocks.1.linear1.weight" in state
    save_file(in_comfy(state) if comfy else state, tmp_path / "flux1-tiny.safetensors")
    files = {"transformer": tmp_path / "flux1-*.safetensors"}
    loaded, reports = load_pipeline(folder, pipeline="FluxPipeline", device=CPU, dtypes=FP32, files=files)
    for key, tensor in plain.transformer.state_dict().items():
        assert torch.equal(loaded.transformer.state_dict()[key], tensor), key
    assert reports["transformer"].tensors == len(plain.transformer.state_dict())
    assert torch.equal(picture(loaded), picture(plain))


@pytest.mark.parametrize("comfy", [False, True], ids=["bare", "comfy"])
def test_a_qwen_image_file_is_the_diffusers_transformer(tmp_path, comfy):
    """Its own keys are diffusers'; ComfyUI's have a prefix, which diffusers leaves on."""
    plain = qwen()
    folder = with_other_weights(plain, tmp_path / "base")
    state = dict(plain.transformer.state_dict())
    save_file(in_comfy(state) if comfy else state, tmp_path / "qwen.safetensors")
    files = {"transformer": tmp_path / "qwen.safetensors"}
    loaded, _ = load_pipeline(folder, pipeline="QwenImagePipeline", device=CPU, dtypes=FP32, files=files)
    for key, tensor in plain.transformer.state_dict().items():
        assert torch.equal(loaded.transformer.state_dict()[key], tensor), key
    assert torch.equal(picture(loaded), picture(plain))


def test_a_wan_file_in_its_own_layout_is_the_diffusers_transformer(tmp_path):
    """In several shards, by a glob, in bf16: what diffusers keeps in fp32 stays fp32."""
    plain = originals.pipeline("t2v")
    folder = with_other_weights(plain, tmp_path / "base")
    originals.write_shards(originals.wan_keys(plain.transformer.state_dict()), tmp_path / "wan", shards=2)
    files = {"transformer": f"{tmp_path}/wan/*.safetensors"}
    dtypes = {"default": torch.bfloat16, "vae": torch.float32}
    loaded, _ = load_pipeline(folder, pipeline="WanPipeline", device=CPU, dtypes=dtypes, files=files)
    plain.save_pretrained(folder)
    expected = type(plain.transformer).from_pretrained(folder / "transformer", dtype=torch.bfloat16)
    for key, tensor in expected.state_dict().items():
        assert loaded.transformer.state_dict()[key].dtype == tensor.dtype, key
        assert torch.equal(loaded.transformer.state_dict()[key], tensor), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_diffusers_folder_is_what_from_pretrained_gives(dtype):
    """Every parameter and buffer, in value and dtype, of every model; scheduler and settings too."""
    dtypes = {"default": dtype, "vae": torch.float32}
    expected = diffusers.WanPipeline.from_pretrained(MODEL_DIR, dtype=dtypes)
    loaded, reports = load_pipeline(MODEL_DIR, pipeline="WanPipeline", device=CPU, dtypes=dtypes)
    assert reports.keys() == {"transformer", "vae"}  # transformers reads its own
    assert loaded.scheduler.config == expected.scheduler.config
    for name, model in expected.components.items():
        if not isinstance(model, torch.nn.Module):
            continue
        for kind in ("named_parameters", "named_buffers"):
            found = dict(getattr(loaded.components[name], kind)())
            wanted = dict(getattr(model, kind)())
            assert found.keys() == wanted.keys(), name
            for key, tensor in wanted.items():
                assert found[key].dtype == tensor.dtype, (name, key)
                assert torch.equal(found[key], tensor), (name, key)


@pytest.mark.usefixtures("_narrow_flux")
@pytest.mark.parametrize("lost", ["img_in.weight", "double_blocks.1.img_attn.qkv.weight", "double_blocks"])
def test_a_flux_file_that_is_not_whole_names_what_it_lacks(tmp_path, lost):
    """The file and its own key, not the converter's stack trace."""
    plain = flux()
    folder = with_other_weights(plain, tmp_path / "base")
    state = originals.flux_keys(plain.transformer.state_dict())
    path = tmp_path / "flux.safetensors"
    save_file({key: value for key, value in state.items() if not key.startswith(lost)}, path)
    asked = "the blocks of this model" if lost == "double_blocks" else f"the key '{lost}'"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path} has not {asked}, but keys such as')}"):
        load_pipeline(folder, pipeline="FluxPipeline", device=CPU, dtypes=FP32, files={"transformer": path})


def test_weights_for_what_is_not_there_are_refused(tmp_path):
    """A component that the folder has not, one that is no diffusers model, and keys that nobody knows."""
    plain = qwen()
    folder = with_other_weights(plain, tmp_path / "base")
    path = tmp_path / "file.safetensors"
    save_file({"lora_A": torch.ones(1)}, path)

    def load(where: Path, pipeline: str, **files: Path) -> None:
        load_pipeline(where, pipeline=pipeline, device=CPU, dtypes=FP32, files=files)

    with pytest.raises(ValueError, match=r"^weights of 'unet' were given; .*model_index.json names no such"):
        load(folder, "QwenImagePipeline", unet=path)
    with pytest.raises(
        ValueError, match="was given for text_encoder, a UMT5EncoderModel; files of diffusers'"
    ):
        load(MODEL_DIR, "WanPipeline", text_encoder=path)
    with pytest.raises(ValueError, match=r"was given for tokenizer, a \w+; files of diffusers' models are"):
        load(MODEL_DIR, "WanPipeline", tokenizer=path)
    with pytest.raises(
        ValueError, match=r"has no place for 'lora_A' \(.*file.safetensors: key 'lora_A'; 1 such\)"
    ):
        load(folder, "QwenImagePipeline", transformer=path)
    with pytest.raises(
        ValueError, match=r"model_index.json does not exist, and .* is no original Wan folder"
    ):
        load(tmp_path, "QwenImagePipeline")


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_every_models_keys_are_checked_before_any_weights_are_read(tmp_path, monkeypatch, layout):
    """Promise 3: what is wrong with the VAE, which comes last, is told before the transformer is read."""
    plain = originals.pipeline("t2v")
    if layout == "original":
        originals.write_original(plain, "t2v", tmp_path)
        path = tmp_path / "Wan2.1_VAE.pth"
        torch.save(torch.load(path) | {"extra": torch.ones(1)}, path)
    else:
        plain.save_pretrained(tmp_path)
        path = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
        save_file({**load_file(path), "extra": torch.ones(1)}, path)

    def read(file: Any, key: str) -> None:
        pytest.fail(f"{key} of {file.path} was read")

    monkeypatch.setattr("runtime.checkpoint._File.tensor", read)
    with pytest.raises(ValueError, match=r"do not fit AutoencoderKLWan: it has no place for 'extra'"):
        load_pipeline(tmp_path, pipeline="WanPipeline", device=CPU, dtypes=FP32)


def test_a_hub_is_asked_for_what_the_index_names(tmp_path):
    """The parts of a diffusers folder as safetensors, or their configs; all files of an original one, whose
    headers say what it is."""
    assert "*.pth" in wanted_files(tmp_path).allow
    assert config_files(tmp_path) == wanted_files(tmp_path)
    index = {"_class_name": "X", "vae": ["diffusers", "AutoencoderKLWan"], "transformer_2": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    wanted = wanted_files(tmp_path)
    assert wanted.allow == ["model_index.json", "vae/*"]
    assert "*.bin" in wanted.ignore
    configs = config_files(tmp_path).allow
    assert configs == ["model_index.json", "vae/*config.json"]
    names = ["model_index.json", "vae/config.json", "vae/x.safetensors", "vae/x.safetensors.index.json"]
    assert list(filter_repo_objects(names, allow_patterns=configs)) == names[:2]
    assert list(filter_repo_objects(names, allow_patterns=wanted.allow)) == names
