"""Whole pipelines on simulated NPUs give the CPU's result, and no operator of theirs runs on the host."""

import numpy as np
import pytest
import torch

from tests.npu import bodies
from tests.usp import test_lora
from tests.usp.in_ranks import Case, alone

# fp32, attention in another order of sums; 2e-6 comes out, and a grey level of 8 bits is 4e-3.
TOLERANCE = 1e-4
# Its two layers add a position bias, a float mask, to the scores of two prompts: no fused kernel takes it.
TEXT_ENCODER_CALLS = 4
# bf16, which has 8 bits: on the CPU it is 6e-3 off the film of fp32, here 8e-3 off the CPU's.
HALF_TOLERANCE = 2e-2
ONE_BRANCH = {"guidance_scale": 1.0}
CASES: list[Case] = [
    ("t2v", {}),
    ("t2v", {"tokens": (1, 1, 1), **ONE_BRANCH}),
    ("i2v", {"tokens": (1, 1, 3), "num_inference_steps": 1}),
    ("ti2v_image", {"tokens": (3, 1, 5), **ONE_BRANCH}),
    ("two_experts", {"tokens": (1, 1, 13)}),
]


@pytest.fixture(scope="module")
def on_the_cpu() -> dict[str, np.ndarray]:
    """One CPU process's result of each case."""
    return {str(case): alone(*case) for case in CASES}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, "auto"),
        (2, "ulysses2"),
        (2, "ring2"),
        (2, "cfg2"),
        (4, "cfg2 gather_kv2"),
    ],
)
def test_every_kind_of_wan_matches_the_cpu(npu, on_the_cpu, size, layout):
    """T2V, I2V, TI2V, two experts, odd and tiny lengths, over strategies and guidance branches."""
    by_rank = npu(size).run(bodies.pipelines, layout, CASES)
    for results in by_rank:
        for case, result in zip(CASES, results, strict=True):
            assert np.abs(result - on_the_cpu[str(case)]).max() <= TOLERANCE, case


@pytest.mark.parametrize(("size", "layout"), [(1, "auto"), (2, "ulysses2"), (2, "ring2"), (4, "cfg2 ring2")])
def test_the_bundled_model_matches_the_cpu_without_the_host(npu, size, layout):
    """The whole film, text encoder and decoding included, with host fallback off; attention is the vendor's.

    TORCH_NPU_FALLBACK_CPU_DISABLE=1 makes an operator without an NPU kernel an error that names it.
    """
    for result, calls, wide in npu(size).run(bodies.demo, layout):
        assert np.abs(result - bodies.film_alone()).max() <= TOLERANCE
        assert calls["npu_fusion_attention"] > 0
        assert calls["sdpa with all scores"] == TEXT_ENCODER_CALLS
        assert wide == {}


@pytest.mark.parametrize("layout", ["ulysses2", "ring2"])
def test_the_bundled_model_in_bf16_takes_the_fused_inference_attention(npu, layout):
    """As models are run on cards: text encoder, transformer and VAE in half precision, over two ranks."""
    want = bodies.film_alone(torch.bfloat16)
    for result, calls, wide in npu(2).run(bodies.demo, layout, torch.bfloat16):
        assert np.abs(result - want).max() <= HALF_TOLERANCE
        assert calls["npu_fused_infer_attention_score"] > 0
        assert calls["sdpa with all scores"] == TEXT_ENCODER_CALLS
        assert wide == {}


@pytest.mark.parametrize("threshold", [0.0, 10.0])
@pytest.mark.parametrize(("size", "layout"), [(2, "ulysses2"), (4, "ulysses2 ring2"), (4, "cfg2 ulysses2")])
def test_a_cache_skips_what_it_skips_on_the_cpu(npu, size, layout, threshold):
    """First-block cache over ranks and branches: the decisions and the result of one CPU process."""
    case = ("t2v", {"num_inference_steps": 5})
    want, skipped = bodies.cached_pipeline("auto", case, threshold)
    assert any(map(any, skipped)) == (threshold > 0), "the threshold is meant to matter"
    for result, found in npu(size).run(bodies.cached_pipeline, layout, case, threshold):
        assert found == skipped
        assert np.abs(result - want).max() <= TOLERANCE


@pytest.mark.parametrize(("size", "layout"), [(2, "ulysses2"), (4, "cfg2 ulysses2")])
def test_lora_is_what_merged_weights_give_on_the_cpu(npu, size, layout):
    """Strength, stacking, switching, unloading and fusing through the wrapper."""
    by_rank = npu(size).run(bodies.run_body, "lora", "through_the_wrapper", layout)
    test_lora.check_against_merged(by_rank, TOLERANCE)


@pytest.mark.parametrize(
    ("way", "at_rest"),
    [("model", "cpu"), ("sequential", "meta"), ("leaf_level", "cpu"), ("block_level", "cpu")],
)
@pytest.mark.parametrize(("size", "layout"), [(2, "ulysses2"), (2, "cfg2"), (4, "cfg2 ring2")])
def test_an_offloaded_pipeline_stays_offloaded_and_matches_the_cpu(npu, size, layout, way, at_rest):
    """diffusers' and accelerate's offloading under the wrapper, text encoder to decoded frames, twice.

    Weights come to the device for their work alone; "meta" is accelerate's sign for the host's copy.
    """
    case = ("t2v", {"num_inference_steps": 2, "output_type": "np"})
    want = alone(*case)
    for results, places in npu(size).run(bodies.offloaded, layout, case, way):
        assert places == {at_rest}
        assert max(np.abs(result - want).max() for result in results) <= TOLERANCE
