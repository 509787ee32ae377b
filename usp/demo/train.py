"""Train the bundled demo model from nothing: `python -m usp.demo.train --work DIR --out usp/demo/model`.

Three stages, each resuming from its checkpoint in the work folder: `vae` (clips to latents and back), `dit`
(text to latents), `export` (the diffusers folder). One core needs about 1 h 45 min.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from usp.demo import MODEL_DIR, dit_stage, vae_stage
from usp.demo.export import export
from usp.demo.training import StageRun

STAGES = ("vae", "dit", "export")
VAE_STEPS, DIT_STEPS = 4800, 7600


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages that the command line names, in order."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    vae_run = StageRun(work=options.work, name="vae", steps=options.vae_steps, seed=options.seed)
    dit_run = StageRun(work=options.work, name="dit", steps=options.dit_steps, seed=options.seed)
    if "vae" in options.stages:
        vae_stage.train_vae(vae_run)
    if "dit" in options.stages:
        dit_stage.train_dit(dit_run)
    if "export" in options.stages:
        size = export(dit_stage.trained_pipeline(options.work), options.out)
        print(f"export: {size / 1e6:.1f} MB in {options.out}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m usp.demo.train", description="Train the demo's tiny Wan pipeline on synthetic clips."
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for checkpoints, latents and samples"
    )
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder of the exported pipeline")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="stages to run, in order")
    parser.add_argument("--vae-steps", type=int, default=VAE_STEPS, help="length of stage vae")
    parser.add_argument("--dit-steps", type=int, default=DIT_STEPS, help="length of stage dit")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seed", type=int, default=0, help="seed of clips, weights and noise")
    return parser


if __name__ == "__main__":
    main()
