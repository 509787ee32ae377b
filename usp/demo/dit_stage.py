"""Training stage `dit`: a WanTransformer3DModel and its text encoder, by flow matching on encoded clips."""

import random
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import nn
from transformers import PreTrainedTokenizerFast

from usp.demo import DEFAULTS, clips, measure, text, training, vae_stage
from usp.demo.export import build_pipeline

CLIPS = 4200  # encoded once, each seen about 20 times
BATCH = 16
MUON_PEAK_LR, ADAMW_PEAK_LR = 2e-3, 2e-3
EMA_DECAY = 0.998
PROMPT_DROPOUT = 0.1
UNKNOWN_WORD = 0.1  # share of captions that get an unknown word somewhere
TRAIN_SHIFT = 3.0
# WanPipeline pads to 512 by default and cross-attention sees the padding: each step draws one length.
PADDED_LENGTHS, LENGTH_WEIGHTS = (24, 64, 226, 512), (80, 8, 6, 6)


def build_transformer() -> WanTransformer3DModel:
    """The demo's DiT with random weights: 5 heads (odd on purpose), 245 tokens per clip, 2.7 M parameters."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=5,
        attention_head_dim=32,
        in_channels=vae_stage.LATENT_CHANNELS,
        out_channels=vae_stage.LATENT_CHANNELS,
        text_dim=text.TEXT_DIM,
        freq_dim=128,
        ffn_dim=640,
        num_layers=6,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    )


class PlainAttention:
    """WanAttnProcessor's result from two matrix products and a softmax.

    In bfloat16 on a CPU the fused kernel's backward takes 2-5 times as long; a whole training step 1.5 times.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The attention module's output, (batch, tokens, channels); no mask is supported, Wan passes none."""
        assert attention_mask is None, "Wan's text-to-video model passes no mask"
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        projected = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(context)), attn.to_v(context)
        q_BSHD, k_BSHD, v_BSHD = (x.unflatten(2, (attn.heads, -1)) for x in projected)
        if rotary_emb is not None:
            q_BSHD, k_BSHD = _rotate(q_BSHD, *rotary_emb), _rotate(k_BSHD, *rotary_emb)
        q, k, v = (
            x.transpose(1, 2).flatten(0, 1) for x in (q_BSHD, k_BSHD, v_BSHD)
        )  # batch x heads, tokens, dim
        weights = torch.bmm(q * q.shape[-1] ** -0.5, k.transpose(1, 2)).softmax(dim=-1)
        out = torch.bmm(weights.to(v.dtype), v).unflatten(0, (-1, attn.heads)).transpose(1, 2).flatten(2)
        return attn.to_out[0](out)


class Denoiser(nn.Module):
    """The two modules trained together; `forward` builds the prompt's embedding as WanPipeline does."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer: Any = build_transformer()
        self.text_encoder: Any = text.build_text_encoder()
        nn.init.zeros_(self.transformer.proj_out.weight)
        nn.init.zeros_(self.transformer.proj_out.bias)

    def forward(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        ids: torch.Tensor,
        mask: torch.Tensor,
        padded: int,
    ) -> torch.Tensor:
        """The predicted velocity (batch, channels, 5, 14, 14); the prompt is zero-padded to `padded` rows."""
        embeds = self.text_encoder(ids, mask).last_hidden_state * mask[..., None]
        embeds = nn.functional.pad(embeds, (0, 0, 0, padded - embeds.shape[1]))
        return self.transformer(latents, timestep, embeds, return_dict=False)[0]


def encode_clips(vae: Any, run: training.StageRun) -> tuple[list[clips.Clip], torch.Tensor]:
    """`CLIPS` training clips, all seen combinations equally often, and their latents, kept on disk."""
    seen = clips.seen_combinations()
    drawn = [clips.draw_clip(random.Random(f"dit-{run.seed}-{i}"), seen[i % len(seen)]) for i in range(CLIPS)]
    path = run.work / "latents.pt"
    if (saved := training.load_checkpoint(path)) is None:
        latents = []
        for i, clip in enumerate(drawn):
            latents.append(vae_stage.encode_clip(vae, clips.render(clip)))
            if (i + 1) % 500 == 0:
                print(f"encode {i + 1}/{CLIPS}", flush=True)
        saved = {"latents": torch.stack(latents)}
        training.save_atomically(saved, path)
    return drawn, saved["latents"]


def train_dit(run: training.StageRun) -> None:
    """Train to `run.steps` steps, from the stage's checkpoint if there is one; the result is that checkpoint.

    The VAE is the one that stage `vae` left in the same work folder.
    """
    drawn, latents = encode_clips(vae_stage.load_vae(run.work / "vae.pt"), run)
    mean, std = vae_stage.latent_statistics(latents)
    latents = (latents - torch.tensor(mean).view(1, -1, 1, 1, 1)) / torch.tensor(std).view(1, -1, 1, 1, 1)
    torch.manual_seed(run.seed)
    model, tokenizer = Denoiser(), text.build_tokenizer()
    model.transformer.set_attn_processor(PlainAttention())
    matrices = [p for p in model.transformer.blocks.parameters() if p.ndim == 2]
    optimizers = training.MatrixAndOtherOptimizers(
        matrices, model, muon_lr=MUON_PEAK_LR, adamw_lr=ADAMW_PEAK_LR
    )
    ema, start = training.ema_copy(model), 0
    if saved := training.load_checkpoint(run.checkpoint):
        model.load_state_dict(saved["model"])
        optimizers.load_state_dict(saved["optimizers"])
        ema, start = saved["ema"], saved["step"]
    losses: dict[str, float] = {}
    for step in training.steps_with_progress(run, start, losses):
        loss = _loss(model, drawn, latents, tokenizer, random.Random(f"batch-{run.seed}-{step}"))
        losses["loss"] = loss.item()
        loss.backward()
        optimizers.step(training.learning_rate_factor(step, run.steps))
        training.ema_update_(ema, model, step, EMA_DECAY)
        if (step + 1) % run.save_every == 0 or step + 1 == run.steps:
            state = {
                "model": model.state_dict(),
                "optimizers": optimizers.state_dict(),
                "ema": ema,
                "step": step + 1,
                "latents_mean": mean,
                "latents_std": std,
            }
            training.save_atomically(state, run.checkpoint)
            _report(run, step + 1)


def trained_pipeline(work: Path) -> WanPipeline:
    """The pipeline that the last checkpoints in the folder `work` make, with averaged weights."""
    if (saved := training.load_checkpoint(work / "dit.pt")) is None:
        raise ValueError(f"no trained transformer in {work}; run stage dit first")
    model = Denoiser()
    model.load_state_dict(saved["ema"])
    vae = vae_stage.load_vae(
        work / "vae.pt", latents_mean=saved["latents_mean"], latents_std=saved["latents_std"]
    )
    return build_pipeline(vae, model.transformer, model.text_encoder)


def generate(pipeline: Any, prompts: list[str], *, seed: int = 0, **overrides: Any) -> list:
    """One clip in 0..1 (17, 112, 112, 3) per prompt, at the demo's defaults; prompt i has seed `seed` + i."""
    pipeline.set_progress_bar_config(disable=True)
    arguments = {
        "height": DEFAULTS.height,
        "width": DEFAULTS.width,
        "num_frames": DEFAULTS.num_frames,
        "num_inference_steps": DEFAULTS.num_inference_steps,
        "guidance_scale": DEFAULTS.guidance_scale,
    }
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    return list(pipeline(prompts, generator=generators, **(arguments | overrides)).frames)


def _rotate(x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2].to(x_BSHD.dtype), sin[..., 1::2].to(x_BSHD.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(3)


def _report(run: training.StageRun, step: int) -> None:
    """Generate seen and held-out combinations, print how many follow their prompt, write pictures."""
    pipeline = trained_pipeline(run.work)
    seen = random.Random(1).sample(clips.seen_combinations(), 12)
    for kind, combinations in (("seen", seen), ("held_out", list(clips.HELD_OUT[::2][:12]))):
        frames = generate(pipeline, [clips.plain_caption(*combination) for combination in combinations])
        rates = measure.following_rates(frames, combinations)
        shown = "  ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
        print(f"{run.name} {step} {kind}: {shown}", flush=True)
        training.contact_sheet(frames[:8], run.work / f"dit_samples_{kind}.png")


def _loss(
    model: Denoiser,
    drawn: list[clips.Clip],
    latents: torch.Tensor,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
) -> torch.Tensor:
    chosen = [rng.randrange(len(drawn)) for _ in range(BATCH)]
    clean = latents[chosen]
    noise = torch.randn_like(clean)
    # One noise level per BATCH-th of the distribution: less variance than independent draws.
    quantile = ((torch.arange(BATCH) + torch.rand(BATCH)) / BATCH).clamp(1e-4, 1 - 1e-4)
    level = torch.sigmoid(torch.special.ndtri(quantile))
    level = TRAIN_SHIFT * level / (1.0 + (TRAIN_SHIFT - 1.0) * level)
    sigma = level.view(-1, 1, 1, 1, 1)
    tokens = tokenizer([_caption(drawn[i], rng) for i in chosen], padding=True, return_tensors="pt")
    padded = rng.choices(PADDED_LENGTHS, LENGTH_WEIGHTS)[0]
    with torch.autocast("cpu", torch.bfloat16):
        velocity = model((1.0 - sigma) * clean + sigma * noise, 1000.0 * level, *tokens.values(), padded)
    return (velocity.float() - (noise - clean)).square().mean()


def _caption(clip: clips.Clip, rng: random.Random) -> str:
    """A wording of `clip`, now and then with an unknown word in it, or nothing."""
    if rng.random() < PROMPT_DROPOUT:
        return ""
    words = rng.choice(clips.captions(clip)).split()
    if rng.random() < UNKNOWN_WORD:
        words.insert(rng.randrange(len(words) + 1), text.UNKNOWN)
    return " ".join(words)
