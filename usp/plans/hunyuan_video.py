"""HunyuanVideo: film, then masked text, joined in every attention; with an image in place of the first frame.

The refiner of the text runs on every rank, two layers of 256 tokens.
"""

from usp.plan import (
    Blocks,
    GatherOutput,
    Held,
    Output,
    ShardPlan,
    SharedAttention,
    SplitCount,
    SplitInput,
    SplitOutput,
    Whole,
)

JOINT = ("tokens", "text")
HELD = (Held(argument="hidden_states"), Held(argument="encoder_hidden_states", streams=("text",)))
WHOLE = (Whole(argument="temb", ndim=2),)
PAIR = ("hidden_states", "encoder_hidden_states")

HUNYUAN_VIDEO = ShardPlan(
    model="HunyuanVideoTransformer3DModel",
    splits=(
        SplitOutput(module="rope", index=0, dim=0, ndim=2),
        SplitOutput(module="rope", index=1, dim=0, ndim=2),
        SplitInput(module="transformer_blocks.0", argument="hidden_states", dim=1, ndim=3),
        SplitInput(
            module="transformer_blocks.0", argument="encoder_hidden_states", dim=1, ndim=3, stream="text"
        ),
        # with an image in place of the first frame, whose tokens are modulated by themselves
        SplitCount(module="transformer_blocks.*", argument="num_tokens"),
        SplitCount(module="single_transformer_blocks.*", argument="num_tokens"),
    ),
    gathers=(GatherOutput(module="proj_out", dim=1),),
    attentions=(
        # the model makes the mask of the whole joined sequence, and hands it to every block
        SharedAttention(modules="transformer_blocks.*.attn", streams=JOINT),
        SharedAttention(modules="single_transformer_blocks.*.attn", streams=JOINT),
    ),
    blocks=(
        Blocks(
            modules="transformer_blocks",
            held=(*HELD, Held(argument="freqs_cis", ndim=2, dim=0)),
            whole=WHOLE,
            outputs=PAIR,
        ),
        Blocks(
            modules="single_transformer_blocks",
            held=(*HELD, Held(argument="image_rotary_emb", ndim=2, dim=0)),
            whole=WHOLE,
            outputs=PAIR,
        ),
    ),
    output=Output(
        batched=(
            *("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"),
            *("pooled_projections", "guidance"),
        ),
    ),
)
