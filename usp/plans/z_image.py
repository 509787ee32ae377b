"""Z-Image: lists of pictures and captions, padded to one sequence per item: picture, then caption.

Captions of a batch may differ in length, so the joined sequence is cut as one. The refiner of the picture is
spread over ranks as the main layers are; those of the caption and of SigLIP's states run on every rank, two
layers of a few tokens. Omni mode has several pictures and captions per item, modulated by token.
"""

from usp.plan import Blocks, GatherOutput, Held, Output, ShardPlan, SharedAttention, SplitInput, Whole

WHOLE = (
    Whole(argument="attn_mask", ndim=2),  # attention over ranks takes the whole mask
    *(Whole(argument=name, ndim=2) for name in ("adaln_input", "adaln_noisy", "adaln_clean")),
)

Z_IMAGE = ShardPlan(
    model="ZImageTransformer2DModel",
    splits=(
        SplitInput(module="", argument="controlnet_block_samples", dim=1, ndim=3),
        SplitInput(module="noise_refiner.0", argument="x", dim=1, ndim=3, stream="picture"),
        SplitInput(module="noise_refiner.*", argument="freqs_cis", dim=1, ndim=3, stream="picture"),
        SplitInput(module="noise_refiner.*", argument="noise_mask", dim=1, ndim=2, stream="picture"),
        SplitInput(module="layers.0", argument="x", dim=1, ndim=3),
        SplitInput(module="layers.*", argument="freqs_cis", dim=1, ndim=3),
        SplitInput(module="layers.*", argument="noise_mask", dim=1, ndim=2),
        SplitInput(module="all_final_layer.*", argument="noise_mask", dim=1, ndim=2),
    ),
    gathers=(
        GatherOutput(module="noise_refiner.-1", dim=1, stream="picture"),
        GatherOutput(module="all_final_layer.*", dim=1),
    ),
    attentions=(
        SharedAttention(modules="noise_refiner.*.attention", streams=("picture",)),
        SharedAttention(modules="layers.*.attention"),
    ),
    blocks=(
        Blocks(
            modules="noise_refiner",
            held=(
                Held(argument="x", streams=("picture",)),
                Held(argument="freqs_cis", streams=("picture",)),
                Held(argument="noise_mask", ndim=2, streams=("picture",)),
            ),
            whole=WHOLE,
            outputs=("x",),
            cached=False,
        ),
        Blocks(
            modules="layers",
            held=(Held(argument="x"), Held(argument="freqs_cis"), Held(argument="noise_mask", ndim=2)),
            whole=WHOLE,
            outputs=("x",),
        ),
    ),
    output=Output(
        argument="x",
        channels=(),
        batched=("x", "t", "cap_feats", "siglip_feats", "image_noise_mask"),
    ),
    stacked=True,
    guided_above=0.0,
    head_config="n_heads",
    head_dim_config="axes_dims",
)
