"""The same bodies as on the CPU and the NPU, on a simulated MUSA: our own device, mccl over gloo."""

import numpy as np
import pytest

from tests.npu import bodies
from tests.npu.test_families import COMPLEX, MOVES
from tests.usp import families, test_lora
from tests.usp.in_ranks import Case, alone

TOLERANCE = 1e-4  # fp32; as for the NPU
LAYOUTS = ("ulysses2", "gather_kv2", "ring2")
CASES: list[Case] = [("t2v", {}), ("ti2v_image", {"tokens": (3, 1, 5), "guidance_scale": 1.0})]


def test_a_rank_finds_its_card(musa):
    """Each rank has its local rank's card and talks mccl; the self-test of all collectives has passed."""
    assert musa(2).run(bodies.place) == [("musa:0", 8, "mccl"), ("musa:1", 8, "mccl")]


def test_the_device_as_the_runtime_sees_it(musa):
    """Memory and its peak, an error for too much of it, generators, fp64."""
    (facts,) = musa(1, SIMULATED_MUSA_MB="64").run(bodies.device_facts)
    assert facts == {
        "total": 64 << 20,
        "peak": 4 << 20,
        "too much": "OutOfMemoryError",
        "same numbers": True,
        "other numbers": True,
        "loaded": True,
    }


@pytest.mark.parametrize("check", ["gathers", "exchanges"])
def test_every_dtype_and_share_travels_unharmed(musa, check):
    """Uneven and empty shares, bool to FP8, strided, on both transports: the same bits."""
    assert musa(2).run(bodies.run_body, "comm", check) == [[], []]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_matches_the_cpu(musa, layout):
    """Odd lengths and heads, grouped queries, half precision, every kind of mask."""
    for worst, _ in musa(2).run(bodies.run_body, "attention", "check_shapes", layout):
        assert worst <= 1e-5
    for body in ("check_options", "check_masks"):
        for errors in musa(2).run(bodies.run_body, "attention", body, layout):
            assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("layout", [*LAYOUTS, "cfg2"])
def test_pipelines_match_the_cpu(musa, layout):
    """Tiny pipelines over strategies and guidance branches."""
    for results in musa(2).run(bodies.pipelines, layout, CASES):
        for case, result in zip(CASES, results, strict=True):
            assert np.abs(result - alone(*case)).max() <= TOLERANCE, case


@pytest.mark.parametrize(
    ("family", "layout"), [("flux", "ulysses2"), ("qwen-image", "gather_kv2"), ("z-image", "ring2")]
)
def test_other_families_make_the_cpus_latents(musa, family, layout):
    """Double streams, and complex angles, which are moved but never computed with, by their own pipelines."""
    cell = families.Cell(size=2, layout=layout)
    want = families.alone(family, cell)
    for found in musa(2).run(bodies.family, family, cell):
        assert found["error"] == ""
        assert np.abs(found["latents"] - want).max() <= TOLERANCE
        if family in COMPLEX:  # the others have fp64 angles, which a MUSA takes
            assert set(found["wide"]) <= MOVES | {"fill_"}  # padding, which an NPU makes in one


def test_the_bundled_model_matches_the_cpu(musa):
    """The whole film on two cards, text encoder and decoding included."""
    for result, _, _ in musa(2).run(bodies.demo, "ulysses2"):
        assert np.abs(result - bodies.film_alone()).max() <= TOLERANCE


@pytest.mark.parametrize("threshold", [0.0, 10.0])
def test_a_cache_skips_what_it_skips_on_the_cpu(musa, threshold):
    """First-block cache over two ranks: the decisions and the result of one CPU process."""
    case = ("t2v", {"num_inference_steps": 5})
    want, skipped = bodies.cached_pipeline("auto", case, threshold)
    assert any(map(any, skipped)) == (threshold > 0), "the threshold is meant to matter"
    for result, found in musa(2).run(bodies.cached_pipeline, "ulysses2", case, threshold):
        assert found == skipped
        assert np.abs(result - want).max() <= TOLERANCE


def test_lora_is_what_merged_weights_give_on_the_cpu(musa):
    """Strength, stacking, switching, unloading and fusing through the wrapper, on two ranks."""
    by_rank = musa(2).run(bodies.run_body, "lora", "through_the_wrapper", "ulysses2")
    test_lora.check_against_merged(by_rank, TOLERANCE)


@pytest.mark.parametrize(
    ("way", "at_rest"),
    [("model", "cpu"), ("sequential", "meta"), ("leaf_level", "cpu"), ("block_level", "cpu")],
)
def test_an_offloaded_pipeline_stays_offloaded_and_matches_the_cpu(musa, way, at_rest):
    """Offloading, twice, as on the NPU; "meta" is accelerate's sign for the host's copy."""
    case: Case = ("t2v", {"num_inference_steps": 2, "output_type": "np"})
    want = alone(*case)
    for results, places in musa(2).run(bodies.offloaded, "ulysses2", case, way):
        assert places == {at_rest}
        assert max(np.abs(result - want).max() for result in results) <= TOLERANCE
