"""Training stage `vae`: an AutoencoderKLWan that packs 17 x 112 x 112 clips into 5 x 14 x 14 latents."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from usp.demo import clips, training

LATENT_CHANNELS = 8
POOL = 1200  # rendered clips that training draws its crops from, 0.77 GB
CROP_SIDE, CROP_BATCH = 56, 3  # all 17 frames: colours drift in later frames if training sees fewer
WHOLE_CLIPS = 0.15  # share of the steps, at the end, that see one whole clip instead of crops
MUON_PEAK_LR, ADAMW_PEAK_LR = 3e-3, 2e-3
EMA_DECAY = 0.998
KL_WEIGHT = 2e-4  # times the mean over latent elements
EDGE_WEIGHT = 0.5


def build_vae(
    *, latents_mean: list[float] | None = None, latents_std: list[float] | None = None
) -> AutoencoderKLWan:
    """The demo's VAE with random weights: 8x smaller in space, 4x in time, about 0.7 M parameters."""
    return AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=12,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        in_channels=12,
        out_channels=12,
        patch_size=2,
        latents_mean=latents_mean or [0.0] * LATENT_CHANNELS,
        latents_std=latents_std or [1.0] * LATENT_CHANNELS,
    )


def train_vae(run: training.StageRun) -> None:
    """Train to `run.steps` steps, from the stage's checkpoint if there is one, and leave the result there."""
    torch.manual_seed(run.seed)
    vae = build_vae()
    _channels_last_(vae)
    optimizers = training.MatrixAndOtherOptimizers(
        [p for name, p in vae.named_parameters() if name.endswith("weight")],
        vae,
        muon_lr=MUON_PEAK_LR,
        adamw_lr=ADAMW_PEAK_LR,
    )
    ema, start = training.ema_copy(vae), 0
    if saved := training.load_checkpoint(run.checkpoint):
        vae.load_state_dict(saved["model"])
        optimizers.load_state_dict(saved["optimizers"])
        ema, start = saved["ema"], saved["step"]
    pool = [
        _to_uint8(clips.render(clips.draw_clip(random.Random(f"vae-{run.seed}-{i}")))) for i in range(POOL)
    ]
    losses: dict[str, float] = {}
    for step in training.steps_with_progress(run, start, losses):
        whole = step >= run.steps * (1.0 - WHOLE_CLIPS)
        loss = _loss(vae, _batch(pool, random.Random(f"crop-{run.seed}-{step}"), whole=whole), losses)
        loss.backward()
        optimizers.step(training.learning_rate_factor(step, run.steps))
        training.ema_update_(ema, vae, step, EMA_DECAY)
        if (step + 1) % run.save_every == 0 or step + 1 == run.steps:
            state = {
                "model": vae.state_dict(),
                "optimizers": optimizers.state_dict(),
                "ema": ema,
                "step": step + 1,
            }
            training.save_atomically(state, run.checkpoint)
            _report(run, step + 1)


def load_vae(
    checkpoint: Path, *, latents_mean: list[float] | None = None, latents_std: list[float] | None = None
) -> AutoencoderKLWan:
    """The VAE with the averaged weights of `checkpoint` and these latent statistics in its config."""
    if (saved := training.load_checkpoint(checkpoint)) is None:
        raise ValueError(f"no trained VAE at {checkpoint}; run stage vae first")
    vae = build_vae(latents_mean=latents_mean, latents_std=latents_std)
    vae.load_state_dict(saved["ema"])
    return vae.eval()


@torch.no_grad()
def latent_statistics(latents: torch.Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of `latents` (clips, channels, frames, height, width)."""
    std, mean = torch.std_mean(latents.float(), dim=(0, 2, 3, 4))
    return mean.tolist(), std.tolist()


@torch.no_grad()
def encode_clip(vae: Any, frames: np.ndarray) -> torch.Tensor:
    """The mean latent (channels, 5, 14, 14), as the VAE gives it, of frames in 0..1 (17, 112, 112, 3)."""
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None] * 2.0 - 1.0
    return vae.encode(pixels).latent_dist.mode()[0]


@torch.no_grad()
def reconstruct(vae: Any, frames: np.ndarray) -> np.ndarray:
    """`frames` in 0..1 (17, 112, 112, 3) after encoding and decoding."""
    pixels = vae.decode(encode_clip(vae, frames)[None]).sample[0]
    return (pixels.permute(1, 2, 3, 0).numpy() + 1.0) / 2.0


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of two clips in 0..1."""
    return float(-10.0 * np.log10(np.mean((a - b) ** 2)))


def _channels_last_(vae: Any) -> None:
    """Lay the weights of all convolutions out channels last: a bfloat16 step takes a third less time."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for name, parameter in vae.named_parameters():
        if name.endswith("weight"):
            parameter.data = parameter.data.to(memory_format=formats[parameter.ndim])


def _loss(vae: Any, pixels: torch.Tensor, losses: dict[str, float]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        posterior = vae.encode(pixels).latent_dist
        out = vae.decode(posterior.sample()).sample
    difference = out.float() - pixels
    l1, mse = difference.abs().mean(), difference.square().mean()
    edges = difference.diff(dim=-1).abs().mean() + difference.diff(dim=-2).abs().mean()
    # posterior.kl() sums over dims 1 to 3 of a picture's latent: ours has a frame dim too.
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    losses.update(l1=l1.item(), mse=mse.item(), edges=edges.item(), kl=kl.item())
    return l1 + mse + EDGE_WEIGHT * edges + KL_WEIGHT * kl


def _batch(pool: list[np.ndarray], rng: random.Random, *, whole: bool) -> torch.Tensor:
    """Pixels in -1..1, (batch, 3, frames, height, width): one whole clip, or crops around the shape."""
    crops = [rng.choice(pool)] if whole else [_crop(rng.choice(pool), rng) for _ in range(CROP_BATCH)]
    flipped = []
    for crop in crops:
        for axis in range(3):  # time, height, width
            crop = np.flip(crop, axis) if rng.random() < 0.5 else crop
        flipped.append(crop)
    return (
        torch.from_numpy(np.stack(flipped)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0
    )  # channels last in memory


def _crop(frames: np.ndarray, rng: random.Random) -> np.ndarray:
    frame = rng.choice(frames).astype(np.float32)
    off = np.abs(frame - frame[0, 0]).max(axis=-1) > 48.0  # the shape: far from the corner's colour
    rows, columns = np.nonzero(off)
    corner = [
        int(np.clip(axis.mean() - CROP_SIDE / 2 + rng.uniform(-20.0, 20.0), 0, clips.SIDE - CROP_SIDE))
        for axis in (rows, columns)
    ]
    y, x = corner
    return frames[:, y : y + CROP_SIDE, x : x + CROP_SIDE]


def _report(run: training.StageRun, step: int) -> None:
    """Print how well the averaged weights reconstruct held-out clips and write those as a picture."""
    vae = load_vae(run.checkpoint)
    rows, quality = [], []
    for i, combination in enumerate(clips.HELD_OUT[:8]):
        frames = clips.render(clips.draw_clip(random.Random(f"held-out-{i}"), combination))
        decoded = reconstruct(vae, frames)
        quality.append(psnr(frames, decoded))
        rows.append(np.concatenate([frames, decoded], axis=2))
    print(f"{run.name} {step}: PSNR mean {np.mean(quality):.1f} dB, worst {min(quality):.1f} dB", flush=True)
    training.contact_sheet(rows[:5], run.work / "vae_samples.png")


def _to_uint8(frames: np.ndarray) -> np.ndarray:
    return (frames * 255.0).round().astype(np.uint8)
