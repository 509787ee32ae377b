"""How the processors of diffusers 0.42.1 rotate query and key, as data for `usp.fusing`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Tables = tuple[torch.Tensor, torch.Tensor]  # cos and sin, 4-D, for (B, S, H, D) or (B, H, S, D)


class Call(NamedTuple):
    """What tables depend on besides the angles."""

    text: int  # tokens of text that come beside the others
    joined: bool  # whether these are joined to the others before the norms
    heads: int


@dataclass(frozen=True)
class Rotation:
    """How a processor of diffusers rotates: by the argument `angles`, right behind the named norms.

    `tables` makes each norm's cos and sin. With `heads_first` norms see (B, H, S, D); with `complex` all
    angles are complex numbers. With `planned` only attentions that a plan shares rotate: the same processor
    also attends across, to text.
    """

    angles: str
    norms: tuple[str, ...]
    tables: Callable[[Any, Call], tuple[Tables, ...]]
    heads_first: bool = False
    complex: bool = False
    planned: bool = False


def _of_tokens(cos_SD: torch.Tensor, sin_SD: torch.Tensor) -> Tables:
    """Tables for (B, S, H, D)."""
    return cos_SD[None, :, None], sin_SD[None, :, None]


def _of_complex(angles: torch.Tensor) -> Tables:
    """Tables for (B, S, H, D) of complex angles, (S, D / 2) or (B, S, D / 2)."""
    cos, sin = (torch.stack((t, t), dim=-1).flatten(-2) for t in (angles.real, angles.imag))
    return (cos[:, :, None], sin[:, :, None]) if angles.ndim == 3 else _of_tokens(cos, sin)


def _wan(angles: Any, call: Call) -> tuple[Tables, ...]:
    """cos and sin are (1, S, 1, D)."""
    return (angles,) * 2


def _flux(angles: Any, call: Call) -> tuple[Tables, ...]:
    """Angles of the text, then of the picture, (S, D); the two meet behind their norms, or before."""
    cos, sin = angles
    if call.text == 0:
        return (_of_tokens(cos, sin),) * 2
    words, picture = slice(call.text), slice(call.text, None)
    return (*(_of_tokens(cos[picture], sin[picture]),) * 2, *(_of_tokens(cos[words], sin[words]),) * 2)


def _qwen(angles: Any, call: Call) -> tuple[Tables, ...]:
    """Complex angles of the pictures, and of the text."""
    pictures, words = (_of_complex(stream) for stream in angles)
    return pictures, pictures, words, words


def _z_image(angles: Any, call: Call) -> tuple[Tables, ...]:
    """Complex angles of all tokens, by sample."""
    return (_of_complex(angles),) * 2


def _hunyuan(angles: Any, call: Call) -> tuple[Tables, ...]:
    """Text that is joined comes last, and does not turn."""
    cos, sin = angles
    if call.joined and call.text:
        cos = torch.cat([cos, cos.new_ones(call.text, cos.shape[1])])
        sin = torch.cat([sin, sin.new_zeros(call.text, sin.shape[1])])
    return (_of_tokens(cos, sin),) * 2


def _cogvideox(angles: Any, call: Call) -> tuple[Tables, ...]:
    """Text comes first, and does not turn; norms see (B, H, S, D)."""
    cos, sin = angles
    cos = torch.cat([cos.new_ones(call.text, cos.shape[1]), cos])
    sin = torch.cat([sin.new_zeros(call.text, sin.shape[1]), sin])
    return ((cos[None, None], sin[None, None]),) * 2


def _ltx(angles: Any, call: Call) -> tuple[Tables, ...]:
    """cos and sin are (B, S, H x D): each head has angles of its own."""
    cos, sin = (table.unflatten(-1, (call.heads, -1)) for table in angles)
    return ((cos, sin),) * 2


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
    "LTXVideoAttnProcessor": Rotation("image_rotary_emb", PAIR, _ltx, planned=True),
}
UNSERVED: dict[str, str] = {"JointAttnProcessor2_0": "does not rotate"}
