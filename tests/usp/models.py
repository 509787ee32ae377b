"""Tiny transformers with random weights, one row for each class that has a plan, and inputs of a forward.

Width 32 (4 heads of 8), two layers of each kind, fp32; every process gets the same weights. To test another
model add a row to MODELS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch

from tests import tiny
from tests.usp.in_ranks import seeded
from usp.plans import PLANS

WIDTH, TEXT_DIM, POOLED = 32, 16, 12
HEADS = {"num_attention_heads": 4, "attention_head_dim": 8}
ROPE = (2, 2, 4)

Inputs = dict[str, Any]
Grid = tuple[int, int, int]  # frames, rows and columns of tokens


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model: how it is built, and what a forward takes for a grid of tokens and a length of text."""

    name: str
    config: dict[str, Any]
    inputs: Callable[..., Inputs]  # (grid, text, batch) and the row's own options

    def build(self, *, seed: int = 1, **config: Any) -> Any:
        """The model."""
        build = partial(getattr(diffusers, self.name), **{**self.config, **config})
        return tiny.seeded(build, seed)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=seeded(seed))


def ids(grid: Grid, axes: int = 3) -> torch.Tensor:
    """Position ids of a grid's tokens, (S, axes)."""
    places = torch.cartesian_prod(*(torch.arange(n) for n in grid))
    return torch.nn.functional.pad(places, (0, axes - 3)).float()


def count(grid: Grid) -> int:
    """Tokens in a grid."""
    return grid[0] * grid[1] * grid[2]


def text_mask(batch: int, text: int) -> torch.Tensor:
    """A key mask, (B, S): the first item has all tokens, the second two less, and so on."""
    lengths = torch.tensor([max(1, text - 2 * item) for item in range(batch)])
    return torch.arange(text) < lengths[:, None]


def flux(
    grid: Grid,
    text: int,
    batch: int = 1,
    *,
    guidance: bool = True,
    batched_ids: bool = False,
    controlnet: bool = False,
) -> Inputs:
    """FLUX.1; the ids of old versions have a batch axis."""
    made: Inputs = {
        "hidden_states": noise(batch, count(grid), 4),
        "encoder_hidden_states": noise(batch, text, TEXT_DIM, seed=1),
        "pooled_projections": noise(batch, POOLED, seed=2),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "img_ids": ids(grid),
        "txt_ids": torch.zeros(text, 3),
    }
    if guidance:
        made["guidance"] = torch.full((batch,), 3.5)
    if batched_ids:
        made["img_ids"], made["txt_ids"] = made["img_ids"][None], made["txt_ids"][None]
    if controlnet:
        for place, name in enumerate(("controlnet_block_samples", "controlnet_single_block_samples")):
            made[name] = [noise(batch, count(grid), WIDTH, seed=5 + place)]
    return made


def flux2(grid: Grid, text: int, batch: int = 1) -> Inputs:
    """FLUX.2: ids have a batch axis and four places, the last for text."""
    words = torch.nn.functional.pad(torch.arange(text).float()[:, None], (3, 0))
    return {
        "hidden_states": noise(batch, count(grid), 4),
        "encoder_hidden_states": noise(batch, text, TEXT_DIM, seed=1),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "img_ids": ids(grid, 4).expand(batch, -1, -1),
        "txt_ids": words.expand(batch, -1, -1),
        "guidance": torch.full((batch,), 3.5),
    }


def qwen(
    grid: Grid, text: int, batch: int = 1, *, references: tuple[Grid, ...] = (), masked: bool = False
) -> Inputs:
    """Qwen-Image; with `references` Edit and Edit-Plus, whose pictures follow one another."""
    pictures = [grid, *references]
    made: Inputs = {
        "hidden_states": noise(batch, sum(map(count, pictures)), 16),
        "encoder_hidden_states": noise(batch, text, TEXT_DIM, seed=1),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "img_shapes": [pictures] * batch,
    }
    if masked:
        made["encoder_hidden_states_mask"] = text_mask(batch, text)
    return made


def sd3(grid: Grid, text: int, batch: int = 1, *, skip_layers: list[int] | None = None) -> Inputs:
    """Stable Diffusion 3."""
    made: Inputs = {
        "hidden_states": noise(batch, 4, 2 * grid[1] * grid[0], 2 * grid[2]),
        "encoder_hidden_states": noise(batch, text, TEXT_DIM, seed=1),
        "pooled_projections": noise(batch, POOLED, seed=2),
        "timestep": torch.linspace(900.0, 300.0, batch),
    }
    return made if skip_layers is None else {**made, "skip_layers": skip_layers}


def z_image(grid: Grid, text: int, batch: int = 1, *, ragged: bool = False) -> Inputs:
    """Z-Image: lists; with `ragged` each caption is 40 tokens longer than the one before."""
    size = (4, grid[0], 2 * grid[1], 2 * grid[2])
    lengths = [text + 40 * item * ragged for item in range(batch)]
    return {
        "x": [noise(*size, seed=item) for item in range(batch)],
        "t": torch.linspace(0.9, 0.3, batch),
        "cap_feats": [noise(n, TEXT_DIM, seed=10 + item) for item, n in enumerate(lengths)],
    }


def wan(grid: Grid, text: int, batch: int = 1) -> Inputs:
    """Wan, text to video."""
    return tiny.model_inputs(grid, batch=batch, text=text)


def vace(grid: Grid, text: int, batch: int = 1) -> Inputs:
    """Wan VACE: a control film of as many frames."""
    frames, rows, columns = grid
    control = noise(batch, 6, frames, 2 * rows, 2 * columns, seed=3)
    return {**wan(grid, text, batch), "control_hidden_states": control}


def hunyuan(grid: Grid, text: int, batch: int = 1) -> Inputs:
    """HunyuanVideo; its mask of the text is always there."""
    frames, rows, columns = grid
    return {
        "hidden_states": noise(batch, 4, frames, 2 * rows, 2 * columns),
        "timestep": torch.linspace(900.0, 300.0, batch),
        "encoder_hidden_states": noise(batch, text, TEXT_DIM, seed=1),
        "encoder_attention_mask": text_mask(batch, text).long(),
        "pooled_projections": noise(batch, POOLED, seed=2),
        "guidance": torch.full((batch,), 3.5),
    }


def cogvideox(grid: Grid, text: int, batch: int = 1) -> Inputs:
    """CogVideoX; the pipeline makes its rope."""
    frames, rows, columns = grid
    angles = ids(grid) @ torch.linspace(0.1, 1.0, 3 * 8).reshape(3, 8)
    return {
        "hidden_states": noise(batch, frames, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": noise(batch, text, TEXT_DIM, seed=1),
        "timestep": torch.linspace(900.0, 300.0, batch),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def ltx(grid: Grid, text: int, batch: int = 1, *, per_token: bool = False) -> Inputs:
    """LTX-Video; with an image each token has its timestep."""
    frames, rows, columns = grid
    timestep = torch.linspace(900.0, 300.0, batch)
    if per_token:
        timestep = timestep[:, None] * torch.linspace(0.0, 1.0, count(grid))
    return {
        "hidden_states": noise(batch, count(grid), 4),
        "encoder_hidden_states": noise(batch, text, TEXT_DIM, seed=1),
        "timestep": timestep,
        "encoder_attention_mask": text_mask(batch, text).long(),
        "num_frames": frames,
        "height": rows,
        "width": columns,
    }


UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 2,
    "cross_attention_dim": TEXT_DIM,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "addition_embed_type": "text_time",  # as in XL
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 12 + POOLED,
}


def unet(grid: Grid, text: int, batch: int = 1) -> Inputs:
    """A UNet: one timestep for the whole batch, and a dict of more."""
    more = {"text_embeds": noise(batch, POOLED, seed=2), "time_ids": noise(batch, 3, seed=3)}
    return {
        "sample": noise(batch, 4, 2 * grid[1], 2 * grid[2]),
        "timestep": torch.tensor(500.0),
        "encoder_hidden_states": noise(batch, text, TEXT_DIM, seed=1),
        "added_cond_kwargs": more,
    }


WAN = {
    **HEADS,
    "in_channels": tiny.CHANNELS,
    "out_channels": tiny.CHANNELS,
    "text_dim": tiny.TEXT_DIM,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}
FLUX = {
    **HEADS,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": TEXT_DIM,
}
MODELS: dict[str, Row] = {
    row.name: row
    for row in (
        Row(name="WanTransformer3DModel", config=WAN, inputs=wan),
        Row(
            name="WanVACETransformer3DModel",
            config={**WAN, "vace_layers": [0, 2], "vace_in_channels": 6},
            inputs=vace,
        ),
        Row(
            name="FluxTransformer2DModel",
            config={**FLUX, "pooled_projection_dim": POOLED, "guidance_embeds": True, "axes_dims_rope": ROPE},
            inputs=flux,
        ),
        Row(
            name="Flux2Transformer2DModel",
            config={**FLUX, "timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2)},
            inputs=flux2,
        ),
        Row(
            name="QwenImageTransformer2DModel",
            config={
                **HEADS,
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": 3,
                "joint_attention_dim": TEXT_DIM,
                "axes_dims_rope": ROPE,
            },
            inputs=qwen,
        ),
        Row(
            name="SD3Transformer2DModel",
            config={
                **HEADS,
                "sample_size": 16,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 3,
                "joint_attention_dim": TEXT_DIM,
                "caption_projection_dim": WIDTH,
                "pooled_projection_dim": POOLED,
                "pos_embed_max_size": 16,
            },
            inputs=sd3,
        ),
        Row(
            name="ZImageTransformer2DModel",
            config={
                "in_channels": 4,
                "dim": WIDTH,
                "n_layers": 3,
                "n_heads": 4,
                "n_kv_heads": 4,
                "cap_feat_dim": TEXT_DIM,
                "axes_dims": [2, 2, 4],
                "axes_lens": [256, 32, 32],
            },
            inputs=z_image,
        ),
        Row(
            name="HunyuanVideoTransformer3DModel",
            config={
                **HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "num_single_layers": 2,
                "num_refiner_layers": 1,
                "text_embed_dim": TEXT_DIM,
                "pooled_projection_dim": POOLED,
                "rope_axes_dim": ROPE,
            },
            inputs=hunyuan,
        ),
        Row(
            name="CogVideoXTransformer3DModel",
            config={
                **HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "time_embed_dim": 16,
                "text_embed_dim": TEXT_DIM,
                "num_layers": 3,
                "use_rotary_positional_embeddings": True,
            },
            inputs=cogvideox,
        ),
        Row(
            name="LTXVideoTransformer3DModel",
            config={
                **HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "cross_attention_dim": WIDTH,
                "num_layers": 3,
                "caption_channels": TEXT_DIM,
            },
            inputs=ltx,
        ),
        Row(name="UNet2DConditionModel", config=UNET, inputs=unet),
    )
}
SPREAD = [name for name in MODELS if PLANS[name].attentions]  # those whose sequence is spread over ranks
