"""A shard plan on a real model: the same result, no trace, and an error where the plan and the model part."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import (
    WanAttnProcessor,
    WanTransformer3DModel,
    WanTransformerBlock,
)
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.usp.in_ranks import error_of, forward, groups_of, hooks, largest
from usp.adapter import sharded
from usp.attention import SequenceAttention
from usp.plan import GatherOutput, SharedAttention, SplitInput, SplitOutput
from usp.plans.wan import WAN

TOLERANCE = 1e-5  # one forward in fp32, several ranks against one: 1e-6 comes out
EACH = [(2, "ulysses2"), (2, "gather_kv2"), (2, "ring2"), (3, "ulysses3"), (3, "gather_kv3"), (3, "ring3")]


def rope_grid(layout: str) -> tuple[float, float, float]:
    """A 3 x 3 x 5 grid, and the same with two tokens of the middle frame swapped."""
    model, inputs = tiny.transformer(), tiny.model_inputs((3, 3, 5))
    swapped = {**inputs, "hidden_states": inputs["hidden_states"].clone()}
    swapped["hidden_states"][:, :, 1, 0:2, 0:2] = inputs["hidden_states"][:, :, 1, 4:6, 8:10]
    swapped["hidden_states"][:, :, 1, 4:6, 8:10] = inputs["hidden_states"][:, :, 1, 0:2, 0:2]
    plain, moved = forward(model, inputs, layout), forward(model, swapped, layout)
    errors = largest(plain, forward(model, inputs)), largest(moved, forward(model, swapped))
    moved[:, :, 1, 0:2, 0:2], moved[:, :, 1, 4:6, 8:10] = (
        moved[:, :, 1, 4:6, 8:10].clone(),
        moved[:, :, 1, 0:2, 0:2].clone(),
    )
    return (*errors, largest(moved, plain))


@pytest.mark.parametrize(("size", "layout"), EACH)
def test_b24_positions_are_global(ranks, size, layout):
    """B24: rope of 4, 2 and 2 dims on a 3 x 3 x 5 grid; tokens that swap places change the result."""
    for plain, moved, difference in ranks(size).run(rope_grid, layout):
        assert plain <= TOLERANCE
        assert moved <= TOLERANCE
        assert difference > 1000 * TOLERANCE


def encoder_lengths(layout: str) -> dict[str, float]:
    """Errors for texts of many lengths, then with image states in front, then with added K/V projections."""
    found = {}
    model = tiny.transformer()
    for text in (1, 5, 77, 226, 512, 13):  # 13 is as long as the sequence
        inputs = tiny.model_inputs((1, 1, 13), text=text)
        found[f"text {text}"] = largest(forward(model, inputs, layout), forward(model, inputs))
    for text, image, added in ((5, 3, None), (4, 3, None), (512, 3, 32), (512, 1, 32)):
        model = tiny.transformer(image_dim=tiny.IMAGE_DIM, added_kv_proj_dim=added)
        inputs = tiny.model_inputs((1, 1, 13), text=text)
        inputs["encoder_hidden_states_image"] = torch.randn(
            1, image, tiny.IMAGE_DIM, generator=torch.Generator().manual_seed(1)
        )
        found[f"text {text} image {image}"] = largest(forward(model, inputs, layout), forward(model, inputs))
    return found


@pytest.mark.parametrize(("size", "layout"), [(2, "ulysses2"), (3, "gather_kv3"), (4, "ring4")])
def test_text_and_image_states_of_any_length_stay_whole(ranks, size, layout):
    """B14, B67, req 5: text of 1 to 512, and image states: cross-attention is local and exact."""
    for found in ranks(size).run(encoder_lengths, layout):
        assert all(error <= TOLERANCE for error in found.values()), found


def collectives_per_block(layout: str) -> tuple[set[int], list[dict[str, int]], float]:
    """Tokens in each block, the calls into torch.distributed while it runs, and the error."""
    model, inputs = tiny.transformer(), tiny.model_inputs((1, 1, 13))
    want = forward(model, inputs)
    worked_on, counts, now = set(), [Counter() for _ in model.blocks], []
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: now.append(i))
        block.register_forward_hook(lambda m, args, out: (worked_on.add(out.shape[1]), now.clear())[1])
    names = ("all_to_all_single", "batch_isend_irecv")
    real = {name: getattr(dist, name) for name in names}

    def counted(name: str, *args: Any, **kwargs: Any) -> Any:
        if now:
            counts[now[0]][name] += 1
        return real[name](*args, **kwargs)

    for name in names:
        setattr(dist, name, partial(counted, name))
    try:
        error = largest(forward(model, inputs, layout), want)
    finally:
        for name in names:
            setattr(dist, name, real[name])
    return worked_on, [dict(c) for c in counts], error


@pytest.mark.parametrize(
    ("size", "layout", "each"),
    [(2, "ulysses2", {"all_to_all_single": 2}), (4, "ring4", {"batch_isend_irecv": 3}),
     (3, "gather_kv3", {"batch_isend_irecv": 1})],
)  # fmt: skip
def test_b20_every_block_works_on_its_share_and_exchanges(ranks, size, layout, each):
    """B20: 13 tokens are cut before block 0, and each block exchanges, no more often than it must."""
    results = ranks(size).run(collectives_per_block, layout)
    assert sum(sum(worked_on) for worked_on, _, _ in results) == 13
    for worked_on, counts, error in results:
        assert len(worked_on) == 1
        assert counts == [each, each]
        assert error <= TOLERANCE


class DriftedBlock(WanTransformerBlock):
    """A block of some later version: it takes two arguments more."""

    later: dict[str, Any]

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args, **self.later)

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb, *, zero_cond, gain):
        if zero_cond:
            encoder_hidden_states = torch.zeros_like(encoder_hidden_states)
        if gain is not None:
            hidden_states = hidden_states * (1 + gain.reshape(*gain.shape[:2], -1).float() / 10)
        return super().forward(hidden_states, encoder_hidden_states, temb, rotary_emb)


class DriftedWan(WanTransformer3DModel):
    """A model of some later version, which hands two new arguments on to its blocks."""

    def forward(
        self, hidden_states, timestep, encoder_hidden_states, *, zero_cond=False, gain=None, **kwargs
    ):
        for block in self.blocks:
            block.__class__ = DriftedBlock
            block.later = {"zero_cond": zero_cond, "gain": gain}
        return super().forward(hidden_states, timestep, encoder_hidden_states, **kwargs)


def with_new_arguments(layout: str) -> tuple[dict[bool, float], float]:
    model, inputs = tiny.transformer(model=DriftedWan), tiny.model_inputs((1, 1, 13))
    forward(model, inputs)  # its blocks are of the later kind from here on
    want = {zero: forward(model, {**inputs, "zero_cond": zero}) for zero in (True, False)}
    errors = {z: largest(forward(model, {**inputs, "zero_cond": z}, layout), want[z]) for z in want}
    return errors, largest(want[True], want[False])


@pytest.mark.parametrize(("size", "layout"), [(2, "ulysses2"), (3, "ring3")])
def test_b40_arguments_that_a_model_gains_later_pass_through(ranks, size, layout):
    """B40: a forward and a block with a new keyword: one process's result, with it and without."""
    for errors, effect in ranks(size).run(with_new_arguments, layout):
        assert all(error <= TOLERANCE for error in errors.values()), errors
        assert effect > 1000 * TOLERANCE, "the keyword is meant to matter"


def with_unplanned_tensor(tokens: int, ndim: int, planned: bool) -> str | float:
    """A forward whose blocks get a per-token tensor: the error if unplanned, else how far off it is."""
    model, inputs = tiny.transformer(model=DriftedWan), tiny.model_inputs((1, 1, tokens))
    gain = (torch.arange(tokens) % 2).reshape(1, tokens, *[1] * (ndim - 2))
    inputs["gain"] = gain
    want = forward(model, inputs)
    if not planned:
        return error_of(forward, model, inputs, "ulysses2")
    plan = replace(
        WAN, splits=(*WAN.splits, SplitInput(module="blocks.*", argument="gain", dim=1, ndim=ndim))
    )
    return largest(forward(model, inputs, "ulysses2", plan), want)


@pytest.mark.parametrize("tokens", [13, 2])
@pytest.mark.parametrize("ndim", [2, 3])
def test_b66_a_per_token_tensor_that_the_plan_does_not_know_is_named(ranks, tokens, ndim):
    """B66, req 7: an uncut modulation index, (B, S) or (B, S, 1), is an error; with an entry it is cut."""
    for text in ranks(2).run(with_unplanned_tensor, tokens, ndim, False):
        assert text.startswith("ValueError: blocks.0 got 'gain' of shape ")
        assert (
            f"uncut axis of {tokens} tokens; the plan for WanTransformer3DModel must split it, or list it as "
            "whole" in text
        )
    for error in ranks(2).run(with_unplanned_tensor, tokens, ndim, True):
        assert error <= TOLERANCE


KEYS = (torch.arange(13) < 9)[None, None, None]  # the last four of 13 tokens are no keys


class NoWideTensors(TorchDispatchMode):
    """Raises when any float64 or complex tensor is made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            wide = isinstance(tensor, torch.Tensor) and (tensor.dtype == torch.float64 or tensor.is_complex())
            assert not wide, f"{func} made a {tensor.dtype} tensor"
        return out


def without_float64(layouts: list[str]) -> list[float]:
    """Errors of forwards that make no float64 or complex tensor; per-token timesteps, and a masked batch."""
    found = []
    for layout in layouts:
        for timestep in (torch.tensor([500.0, 100.0]), torch.linspace(900, 100, 26).reshape(2, 13)):
            model = tiny.transformer()
            model.set_attn_processor(Masked(KEYS))
            inputs = {**tiny.model_inputs((1, 1, 13), batch=2), "timestep": timestep}
            want = forward(model, inputs)
            with NoWideTensors():
                found.append(largest(forward(model, inputs, layout), want))
    return found


def test_b09_no_float64_and_no_complex_tensor_is_made(ranks):
    """B09, req 19: under every strategy a forward stays inside what an NPU or Apple GPU can hold."""
    with pytest.raises(AssertionError, match=r"made a torch\.float64 tensor"), NoWideTensors():
        torch.ones(2, dtype=torch.float64)
    for found in ranks(2).run(without_float64, ["ulysses2", "gather_kv2", "ring2"]):
        assert all(error <= TOLERANCE for error in found), found


class Masked(WanAttnProcessor):
    """A user's processor: hands `options` to self-attention, and a mask for all its tokens."""

    def __init__(self, mask: torch.Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.mask, self.options = mask, options

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        states: Any = None,
        mask: Any = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        if attn.is_cross_attention:
            return super().__call__(attn, hidden_states, states, mask, rotary_emb)
        q, k, v = (p(hidden_states).unflatten(2, (attn.heads, -1)) for p in (attn.to_q, attn.to_k, attn.to_v))
        out = self.attend(q, k, v, attn_mask=self.mask, **self.options)
        return attn.to_out[0](out.flatten(2, 3))

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return dispatch_attention_fn(*args, **kwargs)


class ByHand(Masked):
    """A user's processor that computes its softmax itself."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1).matmul(v.transpose(1, 2)).transpose(1, 2)


def masked(layout: str) -> dict[str, float]:
    """Errors with a key mask, a mask per item, a query-key mask and an additive one, given whole."""
    model, inputs = tiny.transformer(), tiny.model_inputs((1, 1, 13), batch=2)
    generator = torch.Generator().manual_seed(2)
    masks = {
        "key": KEYS,
        "item": (torch.arange(13) < torch.tensor([[13], [4]]))[:, None, None],
        "query-key": torch.rand(13, 13, generator=generator) > 0.4,
        "additive": torch.randn(2, 4, 13, 13, generator=generator) * 3,
    }
    found = {}
    for name, mask in masks.items():
        model.set_attn_processor(Masked(mask))
        found[name] = largest(forward(model, inputs, layout), forward(model, inputs))
    return found


@pytest.mark.parametrize(
    ("size", "layout"), [(2, "ulysses2"), (2, "ring2"), (3, "gather_kv3"), (4, "ulysses2 ring2")]
)
def test_b13_masks_of_a_users_processor_are_kept(ranks, size, layout):
    """B13, req 4: a processor's whole-sequence mask, of any kind, gives one process's result."""
    for found in ranks(size).run(masked, layout):
        assert all(error <= TOLERANCE for error in found.values()), found


def refusals() -> tuple[dict[str, str], dict[str, int], float]:
    """What attention that cannot be shared says, what is left on the stack after it, and the error then."""
    model, inputs = tiny.transformer(), tiny.model_inputs((1, 1, 13))
    want = forward(model, inputs)
    processors = {
        "causal": Masked(is_causal=True),
        "dropout": Masked(dropout_p=0.1),
        "by hand": ByHand(),
        "mask": Masked(torch.ones(1, 1, 1, 5, dtype=torch.bool)),
        "share": Masked(torch.ones(1, 1, 1, 7, dtype=torch.bool)),  # as long as rank 0's share, not rank 1's
    }
    texts, left = {}, {}
    with torch.no_grad(), sharded(model, WAN, SequenceAttention(groups_of("gather_kv2"))):
        kept = model.blocks[1].attn1.processor
        for name, processor in processors.items():
            model.blocks[1].attn1.set_processor(processor)
            texts[name] = error_of(model, **inputs)
            left[name] = len(_get_current_function_mode_stack())
        model.blocks[1].attn1.set_processor(kept)
        error = largest(model(**inputs, return_dict=False)[0], want)
        try:
            with torch.enable_grad():
                texts["gradients"] = error_of(model, **inputs)
        finally:
            left["gradients"] = len(_get_current_function_mode_stack())
    return texts, left, error


def test_attention_that_cannot_be_shared_is_refused_by_module(ranks):
    """Req 40: causal, random, recorded, or not torch's attention: refused by name; then all is well."""
    for texts, left, error in ranks(2).run(refusals, timeout_s=60):
        assert texts["causal"] == (
            "ValueError: blocks.1.attn1 asks for is_causal=True, dropout_p=0.0; attention over ranks is "
            "neither causal nor random; call the model in eval mode"
        )
        assert texts["dropout"].startswith(
            "ValueError: blocks.1.attn1 asks for is_causal=False, dropout_p=0.1;"
        )
        assert texts["by hand"] == (
            "RuntimeError: blocks.1.attn1 did not call torch's scaled_dot_product_attention, so its "
            "attention saw only this rank's tokens; reset its processor and attention backend to the native "
            "ones"
        )
        assert "(1, 1, 1, 5) was given for 13 tokens on 2 ranks" in texts["mask"]
        assert "(1, 1, 1, 7) was given for 13 tokens on 2 ranks" in texts["share"]
        assert texts["gradients"].startswith("RuntimeError: blocks.0.attn1 records gradients;")
        assert set(left.values()) == {0}, "a mode that outlives its module would catch everybody's attention"
        assert error <= TOLERANCE


def interrupted() -> tuple[str, int, float]:
    """Ctrl-C while attention runs: what came out, modes left on the stack, and the error after."""

    def stop(module: Any, args: Any) -> None:
        raise KeyboardInterrupt("Ctrl-C")

    model, inputs = tiny.transformer(), tiny.model_inputs((1, 1, 13))
    want = forward(model, inputs)
    handle = model.blocks[1].attn1.to_out[0].register_forward_pre_hook(stop)
    came = ""
    try:
        forward(model, inputs, "ulysses2")
    except KeyboardInterrupt as error:
        came = str(error)
    handle.remove()
    left = len(_get_current_function_mode_stack())
    return came, left, largest(forward(model, inputs, "ulysses2"), want)


def test_ctrl_c_inside_attention_leaves_nothing_behind(ranks):
    """Req 27: KeyboardInterrupt runs none of torch's module hooks; after close no attention is redirected."""
    for came, left, error in ranks(2).run(interrupted, timeout_s=60):
        assert (came, left) == ("Ctrl-C", 0)
        assert error <= TOLERANCE


def cross_attention_named() -> str:
    """A plan that names cross-attention as shared."""
    plan = replace(WAN, attentions=(SharedAttention(modules="blocks.*.attn*"),))
    return error_of(forward, tiny.transformer(), tiny.model_inputs((1, 1, 13)), "ulysses2", plan)


def test_a_plan_that_shares_cross_attention_is_told_so(ranks):
    """Req 5: attention from 7 tokens to 5 of the text is not the self-attention that the plan says it is."""
    for here, text in enumerate(ranks(2).run(cross_attention_named)):
        assert text == (
            f"ValueError: blocks.0.attn2 attends from {7 - here} to 5 tokens, this rank's share is "
            f"{7 - here}; the plan names it as self-attention over the split tokens"
        )


class LowRank(nn.Module):
    """A layer with an adapter beside it, which takes the layer's place as LoRA libraries have it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.linspace(-1, 1, base.in_features)[:, None] / 8)
        self.up = nn.Parameter(torch.linspace(1, -1, base.out_features)[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down @ self.up


def add_adapters(model: nn.Module) -> None:
    """On attention, feed-forward, and the projection whose result is gathered."""
    for name in ("blocks.0.attn1.to_q", "blocks.1.attn1.to_v", "blocks.1.ffn.net.2", "proj_out"):
        model.set_submodule(name, LowRank(model.get_submodule(name)))


@torch.no_grad()
def changed_after_wrapping(layout: str) -> dict[str, float]:
    """Errors with processors, adapters and hooks that the user sets while the plan is applied."""
    inputs, found = tiny.model_inputs((1, 1, 13)), {}

    def here_and_alone(name: str) -> None:
        together = model(**inputs, return_dict=False)[0]
        shard.close()
        alone = model(**inputs, return_dict=False)[0]
        found[name] = largest(together, alone)
        if name != "plain":
            found[f"{name} matters"] = float(largest(alone, plain) > 1000 * TOLERANCE)

    for name in ("plain", "processor", "hook", "lora", "fused"):
        model = tiny.transformer()
        plain = model(**inputs, return_dict=False)[0]
        shard = sharded(model, WAN, SequenceAttention(groups_of(layout)))
        if name == "processor":
            model.set_attn_processor(Masked(KEYS))
        elif name == "hook":
            model.blocks[1].register_forward_hook(lambda m, args, out: out + torch.arange(32) % 2)
        elif name == "lora":
            add_adapters(model)
        elif name == "fused":
            model.fuse_qkv_projections()
            model.blocks[0].attn1.to_qkv.bias.data += 0.5
        here_and_alone(name)
    return found


@pytest.mark.parametrize(("size", "layout"), [(2, "ulysses2"), (3, "ring3")])
def test_what_the_user_adds_after_wrapping_works(ranks, size, layout):
    """Req 39: processors, hooks, LoRA (on the gathered projection too), fused projections, after wrapping."""
    for found in ranks(size).run(changed_after_wrapping, layout):
        matters = {name: value for name, value in found.items() if name.endswith("matters")}
        assert all(matters.values()), matters
        assert all(error <= TOLERANCE for name, error in found.items() if name not in matters), found


WRONG_PLANS = {
    "names module 'blocks.*.attention'": replace(
        WAN, attentions=(SharedAttention(modules="blocks.*.attention"),)
    ),
    "names module 'unpatchify'": replace(WAN, gathers=(GatherOutput(module="unpatchify", dim=1),)),
    "splits argument 'tokens' of blocks.0, which takes hidden_states, encoder_hidden_states": replace(
        WAN, splits=(*WAN.splits, SplitInput(module="blocks.0", argument="tokens", dim=1, ndim=3))
    ),
    "splits argument 'tokens' of the model, which takes hidden_states, timestep": replace(
        WAN, splits=(SplitInput(module="", argument="tokens", dim=1, ndim=3),)
    ),
}


@pytest.mark.parametrize("text", WRONG_PLANS)
def test_a_plan_entry_that_matches_nothing_is_an_error_and_leaves_no_hook(text):
    """Req 40: a typo in a plan is named before anything is hooked; no layer is left unsharded in silence."""
    model = tiny.transformer()
    before = hooks(model)
    with pytest.raises(ValueError, match=r"^the plan for WanTransformer3DModel ") as caught:
        sharded(model, WRONG_PLANS[text], SequenceAttention(groups_of("ulysses1")))
    assert text in str(caught.value)
    assert hooks(model) == before


def bad_streams() -> list[str]:
    model, inputs = tiny.transformer(), tiny.model_inputs((1, 1, 13))
    texts = [error_of(forward, model, {**inputs, "timestep": torch.ones(1, 12)}, "ulysses2")]
    plan = replace(WAN, splits=(*WAN.splits, SplitOutput(module="blocks.0.ffn", index=0, dim=1, ndim=3)))
    texts.append(error_of(forward, model, inputs, "ulysses2", plan))
    assert hooks(model) == 0
    return texts


def test_tensors_of_one_stream_have_one_length(ranks):
    """Req 7: 12 timesteps for 13 tokens, and an output that is no tuple, are told by both facts."""
    for length, output in ranks(2).run(bad_streams):
        assert length.startswith(
            "ValueError: SplitOutput(module='rope', index=0, dim=1, ndim=4, stream='tokens', "
            "optional=False) got 13 tokens"
        )
        assert "where stream 'tokens' has 12; all tensors of a stream must have one length" in length
        assert output.endswith("blocks.0.ffn gave Tensor, not a tuple with a tensor there")
