"""Fusing where a device has no operators: nothing is touched. With them: tests/npu/test_fused.py."""

import functools
import gc
import logging
import weakref

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.models.activations import GEGLU
from diffusers.models.normalization import RMSNorm

from tests import tiny
from tests.usp.in_ranks import SEED
from usp.demo import tiny as families
from usp.fusing import Fused, PickedAsReal, fuse, plain_norm
from usp.pipeline import ParallelPipeline
from usp.plans import plan_for


def traces(model):
    """What hooks and replaced forwards leave on modules."""
    found = []
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in module.__dict__.items() if "_hooks" in key}
        found.append((name, sorted(module.__dict__), hooks))
    return found


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_on_the_cpu_nothing_is_put_on_a_model(mode):
    """Not one hook or forward, and the report has no row of it."""
    model = tiny.transformer()
    before = traces(model)
    assert fuse(model, plan_for(model), mode, "cpu") is None
    assert traces(model) == before


def test_on_the_cpu_auto_is_off_bit_for_bit(caplog):
    """The same result, and no line of the report says fused."""
    caplog.set_level(logging.INFO)
    results = []
    for mode in ("auto", "off"):
        with ParallelPipeline(tiny.build("t2v"), fused=mode) as pipe:
            results.append(np.asarray(pipe(**tiny.call("t2v"), seed=SEED).frames))
    assert np.array_equal(*results)
    assert "fused" not in caplog.text


def test_on_is_an_error_that_names_a_device_without_operators():
    """Before anything is put on the pipeline, which is left whole."""
    pipeline = tiny.build("t2v")
    before = traces(pipeline.transformer)
    with pytest.raises(ValueError, match="fused=on on cpu; only npu has fused norms and rotations"):
        ParallelPipeline(pipeline, fused="on")
    assert traces(pipeline.transformer) == before


@pytest.mark.parametrize(
    "family", ["wan-t2v", "flux", "qwen-image", "hunyuan-video", "cogvideox", "ltx-video", "sd3"]
)
def test_hooks_change_nothing_where_the_operators_refuse_and_come_off(family):
    """Put on a model on the CPU by hand, each call is handed back; `close`, twice, leaves no trace."""
    model = families.build(family).transformer
    before = traces(model)
    made = Fused(model, plan_for(model))
    assert traces(model) != before
    norms = [m for m in model.modules() if "forward" in m.__dict__]
    assert len(norms) == made.norms
    for norm in norms:
        width = 24 if norm.weight is None else norm.weight.shape[0]
        x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0))
        assert torch.equal(norm(x), type(norm).forward(norm, x))
    made.close()
    made.close()
    assert traces(model) == before


def test_calls_that_are_handed_back_are_the_models_own_bit_for_bit():
    """A whole pipeline on the CPU with everything hooked by hand."""
    results = []
    for hooked in (False, True):
        pipeline = tiny.build("t2v")
        pipeline.set_progress_bar_config(disable=True)
        made = Fused(pipeline.transformer, plan_for(pipeline.transformer)) if hooked else None
        generator = torch.Generator().manual_seed(SEED)
        results.append(np.asarray(pipeline(**tiny.call("t2v"), generator=generator).frames))
        assert made is None or made.rotations
    assert np.array_equal(*results)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_plain_norm_is_that_of_diffusers_bit_for_bit(bias, weights, dtype):
    """It stands in for its forward, which would call the vendor's operator with what that refuses."""
    for affine in (True, False):
        norm = RMSNorm(24, 1e-5, affine, bias).to(weights)
        for parameter in norm.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 2.0, torch.Generator().manual_seed(3))
        x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
        got, want = plain_norm(norm, x), norm(x)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_angles_that_are_picked_as_real_numbers_have_the_same_bits():
    """Z-Image's, made anew and from the table at hand; `close` gives the model its own back."""
    model = families.build("z-image").transformer
    own, ids = model.rope_embedder, torch.tensor([[3, 1, 0], [5, 0, 2]])
    for _ in range(2):
        made = Fused(model, plan_for(model), fusing=False)
        picked = model.rope_embedder(ids)
        assert type(model.rope_embedder) is PickedAsReal
        made.close()
        assert model.rope_embedder is own
        assert picked.dtype == torch.complex64
        assert torch.equal(picked, own(ids))


@pytest.mark.parametrize("kind", ["musa", "mps"])
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_device_without_complex_numbers_gets_real_angles_alone(kind, mode):
    """Only the families that have complex ones, and no norm or gate; `close` leaves no trace."""
    for family in ("z-image", "qwen-image"):
        model = families.build(family).transformer
        before = traces(model)
        made = fuse(model, plan_for(model), mode, kind)
        assert made is not None
        assert str(made) == "off, complex angles as real numbers"
        assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == []
        made.close()
        assert traces(model) == before
    for family in ("wan-t2v", "flux", "sd3"):
        model = families.build(family).transformer
        before = traces(model)
        assert fuse(model, plan_for(model), mode, kind) is None
        assert traces(model) == before
    with pytest.raises(ValueError, match=f"fused=on on {kind}; only npu has"):
        fuse(model, plan_for(model), "on", kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_plain_gate_is_that_of_diffusers_bit_for_bit(dtype):
    """A UNet's GEGLUs: put on by hand on the CPU, each call is handed back; `close` leaves no trace."""
    model = families.build("sd15").unet.to(dtype)
    before = traces(model)
    made = Fused(model, plan_for(model))
    gates = [m for m in model.modules() if isinstance(m, GEGLU)]
    assert made.gates == len(gates) > 0
    assert str(made).startswith(f"0 norms, 0 rotations and {len(gates)} gates fused")
    for gate in gates:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(2, 5, gate.proj.in_features, generator=generator).to(dtype)
        assert "forward" in gate.__dict__
        assert torch.equal(gate(x), GEGLU.forward(gate, x))
    made.close()
    assert traces(model) == before


def test_a_norm_that_another_hook_has_replaced_is_left():
    """As sequential offload does; and a forward that was wrapped since is the plain one after `close`."""
    model = tiny.transformer()
    offloaded, wrapped = model.blocks[0].attn1.norm_q, model.blocks[0].attn1.norm_k
    offloaded.forward = functools.partial(type(offloaded).forward, offloaded)
    made = Fused(model, plan_for(model))
    assert made.left == {"a norm whose forward another hook has replaced": 1}
    ours = wrapped.forward
    wrapped.forward = lambda x: ours(x)
    made.close()
    assert "forward" in wrapped.__dict__
    x = torch.randn(1, 2, wrapped.weight.shape[0])
    assert torch.equal(wrapped(x), torch.nn.RMSNorm.forward(wrapped, x))


def test_a_norm_whose_hook_was_taken_off_is_fused():
    """accelerate puts the forward that it found on the module itself: the class's, or ours, closed since."""
    model = tiny.transformer()
    add_hook_to_module(model.blocks[0].attn1.norm_q, ModelHook())
    remove_hook_from_module(model, recurse=True)
    assert "forward" in model.blocks[0].attn1.norm_q.__dict__
    first = Fused(model, plan_for(model))
    assert (first.norms, first.left) == (8, {})
    add_hook_to_module(model.blocks[0].attn1.norm_k, ModelHook())
    first.close()
    remove_hook_from_module(model, recurse=True)
    assert model.blocks[0].attn1.norm_k.forward.args[0] is first
    second, first = Fused(model, plan_for(model)), weakref.ref(first)
    assert (second.norms, second.left) == (8, {})
    gc.collect()
    assert first() is None, "the closed one is kept alive"
    second.close()
    assert traces(model) == traces(tiny.transformer())


def test_a_norm_that_is_fused_is_not_fused_again():
    """Nor one that is bound to another module."""
    model = tiny.transformer()
    other = model.blocks[0].attn1.norm_k
    first = Fused(model, plan_for(model))
    assert Fused(model, plan_for(model)).left == {"a norm whose forward another hook has replaced": 8}
    first.close()
    model.blocks[0].attn1.norm_q.forward = other.forward
    assert Fused(model, plan_for(model)).left == {"a norm whose forward another hook has replaced": 1}


def test_a_norm_over_several_dims_is_left():
    """The operator takes the last one alone; torch's norm takes the mean over all."""
    model = tiny.transformer()
    model.several = torch.nn.RMSNorm((4, 8), elementwise_affine=False)
    made = Fused(model, plan_for(model))
    assert "forward" not in model.several.__dict__
    assert str(made) == "8 norms and 4 rotations fused; 1 not: a norm over several dims"
    made.close()


def test_a_processor_of_ones_own_keeps_its_rotation():
    """Said in the report, and left alone."""
    model = tiny.transformer()

    class Mine(type(model.blocks[0].attn1.processor)):
        """Rotates in its own way, who knows."""

    model.blocks[0].attn1.set_processor(Mine())
    made = Fused(model, plan_for(model))
    assert str(made) == "8 norms and 2 rotations fused; 1 not: Mine is not a processor that we know"
    made.close()
