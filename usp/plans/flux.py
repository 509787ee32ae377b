"""FLUX.1 and FLUX.2: text and image joined in every attention, in blocks of two streams and then of one."""

from usp.plan import (
    Blocks,
    GatherOutput,
    Held,
    Output,
    Refused,
    ShardPlan,
    SharedAttention,
    SplitInput,
    Whole,
)

INPUTS = (
    SplitInput(module="", argument="hidden_states", dim=1, ndim=3),
    SplitInput(module="", argument="encoder_hidden_states", dim=1, ndim=3, stream="text"),
    # rope is computed from ids, (S, axes) or (B, S, axes), and so for this rank's share alone
    SplitInput(module="", argument="img_ids", dim=0, ndim=2),
    SplitInput(module="", argument="img_ids", dim=1, ndim=3),
    SplitInput(module="", argument="txt_ids", dim=0, ndim=2, stream="text"),
    SplitInput(module="", argument="txt_ids", dim=1, ndim=3, stream="text"),
)
JOINT = ("text", "tokens")
ATTENTIONS = (
    SharedAttention(modules="transformer_blocks.*.attn", streams=JOINT),
    SharedAttention(modules="single_transformer_blocks.*.attn", streams=JOINT),
)
HELD = (
    Held(argument="hidden_states"),
    Held(argument="encoder_hidden_states", streams=("text",)),
    Held(argument="image_rotary_emb", ndim=2, streams=JOINT, dim=0),
)
PAIR = ("encoder_hidden_states", "hidden_states")

FLUX = ShardPlan(
    model="FluxTransformer2DModel",
    splits=(
        *INPUTS,
        SplitInput(module="", argument="controlnet_block_samples", dim=1, ndim=3),
        SplitInput(module="", argument="controlnet_single_block_samples", dim=1, ndim=3),
    ),
    gathers=(GatherOutput(module="proj_out", dim=1),),
    attentions=ATTENTIONS,
    blocks=(
        Blocks(
            modules="transformer_blocks", held=HELD, whole=(Whole(argument="temb", ndim=2),), outputs=PAIR
        ),
        Blocks(
            modules="single_transformer_blocks",
            held=HELD,
            whole=(Whole(argument="temb", ndim=2),),
            outputs=PAIR,
        ),
    ),
    output=Output(
        channel_dim=2,
        channels=("out_channels", "in_channels"),
        times=("patch_size", "patch_size"),
        batched=("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance"),
        batched_inside=("controlnet_block_samples", "controlnet_single_block_samples"),
    ),
)

FLUX2 = ShardPlan(
    model="Flux2Transformer2DModel",
    splits=INPUTS,
    gathers=(GatherOutput(module="proj_out", dim=1),),
    attentions=ATTENTIONS,
    blocks=(
        Blocks(
            modules="transformer_blocks",
            held=HELD,
            whole=(Whole(argument="temb_mod_img", ndim=2), Whole(argument="temb_mod_txt", ndim=2)),
            outputs=PAIR,
        ),
        Blocks(
            modules="single_transformer_blocks",
            held=(Held(argument="hidden_states", streams=JOINT), HELD[2]),
            whole=(Whole(argument="temb_mod", ndim=2),),
        ),
    ),
    output=Output(
        channel_dim=2,
        channels=("out_channels", "in_channels"),
        times=("patch_size", "patch_size"),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "guidance", "img_ids", "txt_ids"),
    ),
    refused=(
        Refused(
            argument="kv_cache_mode",
            why="the cache of reference tokens is cut by counts of the whole sequence, inside the processors",
        ),
    ),
)
