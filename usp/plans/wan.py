"""Wan 2.1 and 2.2, text- and image-to-video; per-token timesteps (TI2V) included."""

from usp.plan import GatherOutput, Output, Replicated, ShardPlan, SharedAttention, SplitInput, SplitOutput

WAN = ShardPlan(
    model="WanTransformer3DModel",
    splits=(
        SplitOutput(module="rope", index=0, dim=1, ndim=4),  # cos and sin, (1, S, 1, D)
        SplitOutput(module="rope", index=1, dim=1, ndim=4),
        SplitInput(
            module="", argument="timestep", dim=1, ndim=2
        ),  # per token only in TI2V; per sample stays whole
        SplitInput(module="blocks.0", argument="hidden_states", dim=1, ndim=3),
    ),
    gathers=(
        GatherOutput(module="proj_out", dim=1),
    ),  # after the projection: 64 channels travel, not the width
    attentions=(SharedAttention(modules="blocks.*.attn1"),),
    blocks="blocks",
    output=Output(
        batched=("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image"),
    ),
    replicated=(
        Replicated(argument="encoder_hidden_states", ndim=3),
        Replicated(argument="temb", ndim=3),  # (B, 6, D) per sample; per token it is (B, S, 6, D) and was cut
    ),
)
