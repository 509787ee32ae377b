"""A shard plan on a real model: the same result, no trace, and an error where the plan and the model part."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanTransformer3DModel, WanTransformerBlock
from peft import LoraConfig
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.usp.in_ranks import error_of, forward, groups_of, hooks, largest, rank
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
    moved[:, :, 1, 0:2, 0:2], moved[:, :, 1, 4:6, 8:10] = moved[:, :, 1, 4:6, 8:10].clone(), moved[:, :, 1, 0:2, 0:2].clone()
    return (*errors, largest(moved, plain))


@pytest.mark.parametrize(("size", "layout"), EACH)
def test_b24_positions_are_global(ranks, size, layout):
    """B24: rope axes of 4, 2 and 2 dims on a 3 x 3 x 5 grid; tokens that change places do not just change places in the result."""
    for plain, moved, difference in ranks(size).run(rope_grid, layout):
        assert plain <= TOLERANCE
        assert moved <= TOLERANCE
        assert difference > 1000 * TOLERANCE


def encoder_lengths(layout: str) -> dict[str, float]:
    """Errors for texts of many lengths, then with image states in front, then with added key/value projections."""
    found = {}
    model = tiny.transformer()
    for text in (1, 5, 77, 226, 512, 13):  # 13 is as long as the sequence
        inputs = tiny.model_inputs((1, 1, 13), text=text)
        found[f"text {text}"] = largest(forward(model, inputs, layout), forward(model, inputs))
    for text, image, added in ((5, 3, None), (4, 3, None), (512, 3, 32), (512, 1, 32)):
        model = tiny.transformer(image_dim=tiny.IMAGE_DIM, added_kv_proj_dim=added)
        inputs = tiny.model_inputs((1, 1, 13), text=text)
        inputs["encoder_hidden_states_image"] = torch.randn(1, image, tiny.IMAGE_DIM, generator=torch.Generator().manual_seed(1))
        found[f"text {text} image {image}"] = largest(forward(model, inputs, layout), forward(model, inputs))
    return found


@pytest.mark.parametrize(("size", "layout"), [(2, "ulysses2"), (3, "gather_kv3"), (4, "ring4")])
def test_text_and_image_states_of_any_length_stay_whole(ranks, size, layout):
    """B14, B67, requirement 5: text of 1 to 512, text + image with and without added K/V: cross-attention is local and exact."""
    for found in ranks(size).run(encoder_lengths, layout):
        assert all(error <= TOLERANCE for error in found.values()), found


def collectives_per_block(layout: str) -> tuple[set[int], list[dict[str, int]], float]:
    """Tokens that enter block 0, the calls into torch.distributed while each block runs, and the error."""
    model, inputs = tiny.transformer(), tiny.model_inputs((1, 1, 13))
    want = forward(model, inputs)
    entered, counts, now = set(), [Counter() for _ in model.blocks], []
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda m, args, i=i: (entered.add(args[0].shape[1]), now.append(i)) and None)
        block.register_forward_hook(lambda *_: now.clear())
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
    return entered, [dict(c) for c in counts], error


@pytest.mark.parametrize(
    ("size", "layout", "each"),
    [(2, "ulysses2", {"all_to_all_single": 2}), (4, "ring4", {"batch_isend_irecv": 3}),
     (3, "gather_kv3", {"batch_isend_irecv": 1})],
)  # fmt: skip
def test_b20_every_block_works_on_its_share_and_exchanges(ranks, size, layout, each):
    """B20: 13 tokens are cut before block 0 (the user's own hooks see the share), and each block exchanges, no more than it must."""
    results = ranks(size).run(collectives_per_block, layout)
    assert sum(next(iter(entered)) for entered, _, _ in results) == 13
    for entered, counts, error in results:
        assert len(entered) == 1
        assert counts == [each, each]
        assert error <= TOLERANCE


class DriftedBlock(WanTransformerBlock):
    """A block of some later version: it takes an argument more, and by keyword."""

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb, *, zero_cond=False, gain=None):  # noqa: ANN001
        if zero_cond:
            encoder_hidden_states = torch.zeros_like(encoder_hidden_states)
        if gain is not None:
            hidden_states = hidden_states * gain.to(hidden_states.dtype).reshape(1, -1, 1)
        return super().forward(hidden_states, encoder_hidden_states, temb, rotary_emb)


class DriftedWan(WanTransformer3DModel):
    """A model of some later version, which hands `zero_cond` and `gain` on to its blocks."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        for block in self.blocks:
            block.__class__ = DriftedBlock

    def forward(self, *args: Any, zero_cond: bool = False, gain: torch.Tensor | None = None, **kwargs: Any) -> Any:
        added = partial(dict, zero_cond=zero_cond, gain=gain)
        for block in self.blocks:
            block.forward = partial(DriftedBlock.forward, block, **added())
        return super().forward(*args, **kwargs)
