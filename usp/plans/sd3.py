"""Stable Diffusion 3 and 3.5: joint attention of image and text; in some layers of the image alone too."""

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

SD3 = ShardPlan(
    model="SD3Transformer2DModel",
    splits=(
        SplitOutput(module="pos_embed", dim=1, ndim=3),  # not at block 0, which skip_layers may leave out
        SplitOutput(module="context_embedder", dim=1, ndim=3, stream="text"),
        SplitInput(module="", argument="block_controlnet_hidden_states", dim=1, ndim=3),
    ),
    gathers=(GatherOutput(module="proj_out", dim=1),),
    attentions=(
        SharedAttention(modules="transformer_blocks.*.attn", streams=("tokens", "text")),
        SharedAttention(modules="transformer_blocks.*.attn2", optional=True),  # SD 3.5 medium
    ),
    blocks=(
        Blocks(
            modules="transformer_blocks",
            held=(Held(argument="hidden_states"), Held(argument="encoder_hidden_states", streams=("text",))),
            whole=(Whole(argument="temb", ndim=2),),
            outputs=("encoder_hidden_states", "hidden_states"),
        ),
    ),
    output=Output(
        channels=("out_channels", "in_channels"),
        batched=("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"),
        batched_inside=("block_controlnet_hidden_states",),
    ),
    stacked=True,
    told_apart_by=("skip_layers",),  # skip-layer guidance: one more forward in some steps
)
