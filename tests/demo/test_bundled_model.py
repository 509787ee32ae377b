"""The bundled model is an ordinary small diffusers folder with the odd sizes that other tests rely on."""

import subprocess
import sys

import pytest
import torch
from diffusers import WanPipeline

from usp.demo import DEFAULTS, MODEL_DIR, unknown_words


@pytest.fixture(scope="module")
def pipeline() -> WanPipeline:
    """The bundled pipeline, loaded as a user would, in float32."""
    pipeline = WanPipeline.from_pretrained(MODEL_DIR).to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_folder_is_small() -> None:
    """The whole folder stays under 12 MB, so that it can live in the repository."""
    assert sum(path.stat().st_size for path in MODEL_DIR.rglob("*") if path.is_file()) <= 12e6


def test_token_and_head_counts_are_uneven(pipeline: WanPipeline) -> None:
    """245 tokens and 5 heads: no degree of 2, 3 or 4 divides either."""
    tokens = []
    hook = pipeline.transformer.blocks[0].register_forward_pre_hook(
        lambda module, args: tokens.append(args[0].shape[1])
    )
    pipeline(
        DEFAULTS.prompt,
        height=DEFAULTS.height,
        width=DEFAULTS.width,
        num_frames=DEFAULTS.num_frames,
        num_inference_steps=1,
        output_type="latent",
    )
    hook.remove()
    assert set(tokens) == {245}
    assert pipeline.transformer.config.num_attention_heads == 5
    assert all(count % degree for count in (245, 5) for degree in (2, 3, 4))


def test_tokenizer_ends_texts_and_marks_unknown_words(pipeline: WanPipeline) -> None:
    """A token per word or background phrase, then the end token; an unknown word is `<unk>` and reported."""
    prompt = "A red ball, moving right on a gray background."
    tokens = pipeline.tokenizer.convert_ids_to_tokens(pipeline.tokenizer(prompt).input_ids)
    assert tokens == ["a", "red", "<unk>", "moving", "right", "grey_background", "</s>"]
    assert unknown_words(prompt) == ["ball"]
    assert pipeline.tokenizer("on blue").input_ids == pipeline.tokenizer("over the blue background").input_ids
    assert pipeline.tokenizer("").input_ids == [pipeline.tokenizer.eos_token_id]
    assert unknown_words(DEFAULTS.prompt) == []


def test_package_imports_neither_torch_nor_diffusers() -> None:
    """The command line can ask for defaults and unknown words before anything heavy is imported."""
    code = "import sys, usp.demo; print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
