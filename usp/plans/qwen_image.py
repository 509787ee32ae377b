"""Qwen-Image, Edit, Edit-Plus: text and image joined in every attention, masked text, several pictures."""

from usp.plan import (
    Blocks,
    GatherOutput,
    Held,
    Output,
    ShardPlan,
    SharedAttention,
    SplitInput,
    SplitMask,
    SplitOutput,
    Whole,
)

QWEN_IMAGE = ShardPlan(
    model="QwenImageTransformer2DModel",
    splits=(
        SplitInput(module="transformer_blocks.0", argument="hidden_states", dim=1, ndim=3),
        SplitOutput(module="pos_embed", index=0, dim=0, ndim=2),  # of all pictures, one after another
        SplitOutput(module="pos_embed", index=1, dim=0, ndim=2, stream="text"),
        SplitInput(
            module="transformer_blocks.0", argument="encoder_hidden_states", dim=1, ndim=3, stream="text"
        ),
        SplitMask(module="transformer_blocks.*", argument="encoder_hidden_states_mask", stream="text"),
        # with zero_cond_t: 0 for tokens of the picture that is made, 1 for those of references
        SplitInput(module="transformer_blocks.*", argument="modulate_index", dim=1, ndim=2),
        SplitInput(module="", argument="controlnet_block_samples", dim=1, ndim=3),
    ),
    gathers=(GatherOutput(module="proj_out", dim=1),),
    attentions=(SharedAttention(modules="transformer_blocks.*.attn", streams=("text", "tokens")),),
    blocks=(
        Blocks(
            modules="transformer_blocks",
            held=(
                Held(argument="hidden_states"),
                Held(argument="encoder_hidden_states", streams=("text",)),
                Held(argument="encoder_hidden_states_mask", ndim=2, streams=("text",)),
                Held(argument="image_rotary_emb", ndim=2, dim=0, index=0),
                Held(argument="image_rotary_emb", ndim=2, streams=("text",), dim=0, index=1),
                Held(argument="modulate_index", ndim=2),
            ),
            whole=(Whole(argument="temb", ndim=2),),
            outputs=("encoder_hidden_states", "hidden_states"),
        ),
    ),
    output=Output(
        channel_dim=2,
        channels=("out_channels", "in_channels"),
        times=("patch_size", "patch_size"),
        batched=(
            *("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep"),
            *("img_shapes", "guidance", "additional_t_cond"),
        ),
        batched_inside=("controlnet_block_samples",),
    ),
)
