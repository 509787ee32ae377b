"""CogVideoX: text, then film, joined in every attention."""

from usp.plan import Blocks, GatherOutput, Held, Output, ShardPlan, SharedAttention, SplitInput, Whole

COGVIDEOX = ShardPlan(
    model="CogVideoXTransformer3DModel",
    splits=(
        SplitInput(module="", argument="image_rotary_emb", dim=0, ndim=2),  # made by the pipeline
        SplitInput(module="transformer_blocks.0", argument="hidden_states", dim=1, ndim=3),
        SplitInput(
            module="transformer_blocks.0", argument="encoder_hidden_states", dim=1, ndim=3, stream="text"
        ),
    ),
    gathers=(GatherOutput(module="proj_out", dim=1),),
    attentions=(SharedAttention(modules="transformer_blocks.*.attn1", streams=("text", "tokens")),),
    blocks=(
        Blocks(
            modules="transformer_blocks",
            held=(
                Held(argument="hidden_states"),
                Held(argument="encoder_hidden_states", streams=("text",)),
                Held(argument="image_rotary_emb", ndim=2, dim=0),
            ),
            whole=(Whole(argument="temb", ndim=2),),
            outputs=("hidden_states", "encoder_hidden_states"),
        ),
    ),
    output=Output(
        channel_dim=2,
        batched=("hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs"),
    ),
    stacked=True,
)
