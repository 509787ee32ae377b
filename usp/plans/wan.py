"""Wan 2.1 and 2.2: text- and image-to-video, per-token timesteps (TI2V) included; VACE."""

from usp.plan import (
    Blocks,
    GatherOutput,
    Held,
    Output,
    ShardPlan,
    SharedAttention,
    SplitInput,
    SplitOutput,
    Whole,
)

ROPE = (
    SplitOutput(module="rope", index=0, dim=1, ndim=4),  # cos and sin, (1, S, 1, D)
    SplitOutput(module="rope", index=1, dim=1, ndim=4),
)
WHOLE = (
    Whole(argument="encoder_hidden_states", ndim=3),
    Whole(argument="temb", ndim=3),  # (B, 6, D) per sample; per token it is (B, S, 6, D) and was cut
)
BATCHED = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image")

WAN = ShardPlan(
    model="WanTransformer3DModel",
    splits=(
        *ROPE,
        SplitInput(
            module="", argument="timestep", dim=1, ndim=2
        ),  # per token only in TI2V; per sample stays whole
        SplitInput(module="blocks.0", argument="hidden_states", dim=1, ndim=3),
    ),
    gathers=(
        GatherOutput(module="proj_out", dim=1),
    ),  # after the projection: 64 channels travel, not the width
    attentions=(SharedAttention(modules="blocks.*.attn1"),),
    blocks=(Blocks(modules="blocks", whole=WHOLE),),
    output=Output(batched=BATCHED),
)

VACE = ShardPlan(
    model="WanVACETransformer3DModel",
    splits=(
        *ROPE,
        SplitInput(module="vace_blocks.*", argument="hidden_states", dim=1, ndim=3),
        SplitInput(module="vace_blocks.0", argument="control_hidden_states", dim=1, ndim=3),
        SplitInput(module="blocks.0", argument="hidden_states", dim=1, ndim=3),
    ),
    gathers=(GatherOutput(module="proj_out", dim=1),),
    attentions=(
        SharedAttention(modules="vace_blocks.*.attn1"),
        SharedAttention(modules="blocks.*.attn1"),
    ),
    blocks=(
        Blocks(
            modules="vace_blocks",
            held=(Held(argument="hidden_states"), Held(argument="control_hidden_states")),
            whole=WHOLE,
            cached=False,  # they run before the first block, and make the hints that the others add
        ),
        Blocks(modules="blocks", whole=WHOLE),
    ),
    output=Output(batched=(*BATCHED, "control_hidden_states")),
)
