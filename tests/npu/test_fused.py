"""The vendor's fused norms and rotations: equal to the plain forms, handed back where refused, undone."""

import numpy as np
import pytest

from tests.npu import bodies, fusing
from tests.usp.families import STEPS, Cell, alone

# In ulps: the operator rounds its result, the plain form of diffusers also the norm before its weight.
# Rotations are of fp32 inside, by one formula, and must be equal: rounded angles would show.
ROUNDINGS = 3.0
TOLERANCE = 1e-4  # as for whole pipelines
LAYERS, FORWARDS = 6, 4  # of the bundled model: two steps of two branches
# Each family's norms and rotations in one forward of its tiny transformer.
FAMILIES = {
    "wan-t2v": (8, 4),
    "wan-i2v": (10, 4),
    "wan-vace": (16, 8),
    "flux": (12, 12),
    "flux2": (12, 12),
    "qwen-image": (9, 8),
    "z-image": (25, 8),
    "hunyuan-video": (12, 8),
    "cogvideox": (0, 4),
    "ltx-video": (12, 4),
    "sd3": (16, 0),
}
LEFT = {"sd3": "; 5 not: JointAttnProcessor2_0 does not rotate"}


def test_every_norm_matches_its_plain_form(npu):
    """torch's and diffusers' RMSNorm, with and without weight, bias and eps, for each pair of dtypes."""
    (errors,) = npu(1).run(fusing.norm_errors)
    assert {name: e for name, e in errors.items() if not e <= ROUNDINGS} == {}


def test_every_rotation_matches_its_plain_form(npu):
    """Each layout and edge of the accepted sizes, tables by sample and head, both modes, fp32 angles."""
    (errors,) = npu(1).run(fusing.rotation_errors)
    assert {name: e for name, e in errors.items() if e != 0} == {}


def test_what_an_operator_refuses_is_plain_and_says_why(npu):
    """Odd and wide heads, tables of axes apart, fp64, empty tensors: the plain result, and a reason."""
    (found,) = npu(1).run(fusing.handed_back)
    rotation, norm = "the fused rotation takes", "the fused norm"
    assert found == {
        "odd head dim": f"{rotation} even head dims to 895 and whole tables, not 7 with 8",
        "head dim 896": f"{rotation} even head dims to 895 and whole tables, not 896 with 896",
        "1000 rows": f"{rotation} batch x heads to 999, not 40 x 25",
        "1000 heads by sample": f"{rotation} batch x heads to 999, not 1 x 1000",
        "tables by axes apart": f"{rotation} tables by neighbouring axes of (2, 3, 4, 8), "
        "not (2, 1, 4, 8) on npu:0",
        "three dims": f"{rotation} 4 dims and equal tables, not 3 with (4, 1, 8) on npu:0",
        "fp64": "the fused rotation does not take float64",
        "fp64 tables": "the fused rotation does not take float64",
        "half tables": f"{rotation} even head dims to 895 and whole tables, not 8 with 4",
        "empty": f"{rotation} no empty tensor",
        "norm of fp64": f"{norm} does not take float64",
        "norm with a weight of fp64": f"{norm} does not take float64",
        "norm of one dim": f"{norm} takes 2 to 8 dims, not 1",
        "norm of nine dims": f"{norm} takes 2 to 8 dims, not 9",
        "norm of nothing": f"{norm} takes no empty tensor",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformer_is_the_hosts_fused_and_plain_and_is_given_back(npu, family):
    """Fused it calls each operator as often as it says; off, also diffusers' own norms call none."""
    (found,) = npu(1).run(fusing.transformer, family, {})
    assert found["on"]["counts"] == FAMILIES[family]
    norms, rotations = FAMILIES[family]
    called = {"npu_rms_norm": norms, "npu_rotary_mul": rotations}
    assert found["on"]["ran"] == {name: times for name, times in called.items() if times}
    assert found["off"]["ran"] == {}
    assert found["off"]["said"] == "off"
    assert max(found["on"]["error"], found["off"]["error"]) <= TOLERANCE
    assert found["on"]["said"] == f"{norms} norms and {rotations} rotations fused{LEFT.get(family, '')}"


def test_a_model_with_nothing_to_fuse_is_an_error(npu):
    """A UNet has neither norm nor rotation: an error for `on` alone."""
    (error,) = npu(1).run(fusing.unet_with, "on")
    assert error.startswith("ValueError: fused=on, and UNet2DConditionModel has no norm or rotation")
    assert npu(1).run(fusing.unet_with, "auto") == ["0 norms and 0 rotations fused"]


@pytest.mark.parametrize("mode", ["on", "auto", "off"])
def test_the_bundled_model_over_two_ranks(npu, mode):
    """The CPU's film, with exactly as many calls of the vendor's operators as the model has."""
    for result, calls, wide in npu(2).run(fusing.demo, "ulysses2", mode):
        assert np.abs(result - bodies.film_alone()).max() <= TOLERANCE
        assert wide == {}
        fused = mode != "off"
        assert calls.get("npu_rms_norm", 0) == fused * 4 * LAYERS * FORWARDS
        assert calls.get("npu_rotary_mul", 0) == fused * 2 * LAYERS * FORWARDS


def test_the_first_generation_turns_halves_only_and_complex_angles_become_real(npu):
    """An Ascend910A's operator refuses neighbouring pairs: plain, with the reason, and no complex product."""
    ranks = npu(1, SIMULATED_NPU_SOC="Ascend910A")
    refused = "the fused rotation of neighbouring pairs is in Ascend910B1 and newer chips"
    assert ranks.run(fusing.rotation_limits) == [{"neighbours": refused, "halves": None}]
    (found,) = ranks.run(fusing.transformer, "z-image", {})
    assert found["on"]["ran"] == {"npu_rms_norm": FAMILIES["z-image"][0]}
    assert found["on"]["said"] == f"25 norms and 0 rotations fused; 4 not: {refused}"
    assert found["on"]["complex"] == 0
    assert found["off"]["complex"] == FAMILIES["z-image"][1]
    assert max(found["on"]["error"], found["off"]["error"]) <= TOLERANCE


def test_tables_by_sample_and_by_head_over_two_ranks(npu):
    """LTX-Video's two guided prompts, cut over ranks: one process's latents, with every rotation fused."""
    cell = Cell(size=2, layout="ulysses2", batch=True)
    want = alone("ltx-video", cell)
    for result, calls in npu(2).run(fusing.shared, "ltx-video", cell):
        assert result.shape == want.shape
        assert np.abs(result - want).max() <= TOLERANCE
        assert calls["npu_rotary_mul"] == FAMILIES["ltx-video"][1] * STEPS["num_inference_steps"]


def test_private_formats_and_compiling_are_off_before_weights_move(npu):
    """Also where a user turned them on: else convolution weights change their layout, or lose digits."""
    (seen,) = npu(1).run(fusing.options_when_weights_move)
    assert seen
    assert set(seen) == {(True, "disable")}


def test_our_calls_name_what_has_a_default_of_its_own(npu):
    """By the wheel's schemas: what chooses a formula is an argument, and always given."""
    named = {
        "npu_rms_norm": ["epsilon"],
        "npu_rotary_mul": ["rotary_mode"],
        "npu_geglu": ["dim", "approximate"],
    }
    assert npu(1).run(fusing.keywords) == [named]


def test_every_gate_matches_its_plain_form(npu):
    """Whole and strided, of 1 to 8 dims and empty, by the exact GELU; the rest is handed back."""
    ((errors, refused),) = npu(1).run(fusing.gate_errors)
    assert {name: e for name, e in errors.items() if not e <= ROUNDINGS} == {}
    assert refused == {
        "fp64": "the fused GEGLU does not take float64",
        "nine dims": "the fused GEGLU takes 1 to 8 dims, not 9",
    }
