"""How the processors of diffusers 0.42.1 rotate query and key, as data for `usp.fusing`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tables = tuple[torch.Tensor, torch.Tensor]  # cos and sin, 4-D, for (B, S, H, D) or (B, H, S, D)


@dataclass(frozen=True)
class Rotation:
    """How a processor of diffusers rotates: by the argument `angles`, right behind the named norms.

    `tables` makes each norm's cos and sin from the angles, the number of text tokens, and whether these are
    joined to the others before the norms. With `heads_first` norms see (B, H, S, D); with `complex` all
    angles are complex numbers.
    """

    angles: str
    norms: tuple[str, ...]
    tables: Callable[[Any, int, bool], tuple[Tables, ...]]
    heads_first: bool = False
    complex: bool = False


def _of_tokens(cos_SD: torch.Tensor, sin_SD: torch.Tensor) -> Tables:
    """Tables for (B, S, H, D)."""
    return cos_SD[None, :, None], sin_SD[None, :, None]


def _of_complex(angles: torch.Tensor) -> Tables:
    """Tables for (B, S, H, D) of complex angles, (S, D / 2) or (B, S, D / 2)."""
    cos, sin = (torch.stack((t, t), dim=-1).flatten(-2) for t in (angles.real, angles.imag))
    return (cos[:, :, None], sin[:, :, None]) if angles.ndim == 3 else _of_tokens(cos, sin)


def _wan(angles: Any, text: int, joined: bool) -> tuple[Tables, ...]:
    """cos and sin are (1, S, 1, D)."""
    return (angles,) * 2


def _flux(angles: Any, text: int, joined: bool) -> tuple[Tables, ...]:
    """Angles of the text, then of the picture, (S, D); the two meet behind their norms, or before."""
    cos, sin = angles
    if text == 0:
        return (_of_tokens(cos, sin),) * 2
    return (*(_of_tokens(cos[text:], sin[text:]),) * 2, *(_of_tokens(cos[:text], sin[:text]),) * 2)


def _qwen(angles: Any, text: int, joined: bool) -> tuple[Tables, ...]:
    """Complex angles of the pictures, and of the text."""
    pictures, words = (_of_complex(stream) for stream in angles)
    return pictures, pictures, words, words


def _z_image(angles: Any, text: int, joined: bool) -> tuple[Tables, ...]:
    """Complex angles of all tokens, by sample."""
    return (_of_complex(angles),) * 2


def _hunyuan(angles: Any, text: int, joined: bool) -> tuple[Tables, ...]:
    """Text that is joined comes last, and does not turn."""
    cos, sin = angles
    if joined and text:
        cos = torch.cat([cos, cos.new_ones(text, cos.shape[1])])
        sin = torch.cat([sin, sin.new_zeros(text, sin.shape[1])])
    return (_of_tokens(cos, sin),) * 2


def _cogvideox(angles: Any, text: int, joined: bool) -> tuple[Tables, ...]:
    """Text comes first, and does not turn; norms see (B, H, S, D)."""
    cos, sin = angles
    cos = torch.cat([cos.new_ones(text, cos.shape[1]), cos])
    sin = torch.cat([sin.new_zeros(text, sin.shape[1]), sin])
    return ((cos[None, None], sin[None, None]),) * 2


PAIR = ("norm_q", "norm_k")
PAIRS = (*PAIR, "norm_added_q", "norm_added_k")
FLUX_ANGLES = Rotation("image_rotary_emb", PAIRS, _flux)
# By class of processor; a processor of one's own is left alone.
ROTATIONS: dict[str, Rotation] = {
    "WanAttnProcessor": Rotation("rotary_emb", PAIR, _wan),
    "FluxAttnProcessor": FLUX_ANGLES,
    "Flux2AttnProcessor": FLUX_ANGLES,
    "Flux2ParallelSelfAttnProcessor": FLUX_ANGLES,
    "QwenDoubleStreamAttnProcessor2_0": Rotation("image_rotary_emb", PAIRS, _qwen, complex=True),
    "ZSingleStreamAttnProcessor": Rotation("freqs_cis", PAIR, _z_image, complex=True),
    "HunyuanVideoAttnProcessor2_0": Rotation("image_rotary_emb", PAIR, _hunyuan),
    "CogVideoXAttnProcessor2_0": Rotation("image_rotary_emb", PAIR, _cogvideox, heads_first=True),
}
UNSERVED: dict[str, str] = {
    "LTXVideoAttnProcessor": "has angles of its own for each head, which no operator takes",
    "JointAttnProcessor2_0": "does not rotate",
}
