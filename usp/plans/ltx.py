"""LTX-Video: text is attended to across; per-token timesteps with an image."""

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

LTX = ShardPlan(
    model="LTXVideoTransformer3DModel",
    splits=(
        SplitInput(module="", argument="hidden_states", dim=1, ndim=3),
        SplitInput(module="", argument="timestep", dim=1, ndim=2),  # per token; per sample stays whole
        SplitOutput(module="rope", index=0, dim=1, ndim=3),
        SplitOutput(module="rope", index=1, dim=1, ndim=3),
    ),
    gathers=(GatherOutput(module="proj_out", dim=1),),
    attentions=(SharedAttention(modules="transformer_blocks.*.attn1"),),
    blocks=(
        Blocks(
            modules="transformer_blocks",
            held=(Held(argument="hidden_states"), Held(argument="image_rotary_emb")),
            whole=(Whole(argument="encoder_hidden_states", ndim=3),),
        ),
    ),
    output=Output(
        channel_dim=2,
        channels=("out_channels", "in_channels"),
        batched=(
            *("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask"),
            "video_coords",
        ),
    ),
    stacked=True,
)
