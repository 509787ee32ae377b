"""The AutoencoderKL that most image models share, with few channels and the real factor of 8."""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

from diffusers import AutoencoderKL

SCALING, SHIFT = 0.7, 0.1


def kl_vae(channels: int, *, shift: float | None = SHIFT) -> AutoencoderKL:
    """An AutoencoderKL of so many latent channels that shrinks by 8; without `shift` as in SD 1.5."""
    quant = shift is None
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=channels,
        scaling_factor=SCALING,
        shift_factor=shift,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
    )
