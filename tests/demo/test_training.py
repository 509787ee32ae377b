"""The training script: a resumed run equals an unbroken one, and its shortcuts change nothing."""

from pathlib import Path

import pytest
import torch

from usp.demo import dit_stage, text, train, training, vae_stage


class Interrupted(Exception):
    """Stands for the machine going away right after a checkpoint."""


def test_resumed_training_equals_unbroken_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage vae, stopped after its first checkpoint and started again, ends with the same bits."""
    monkeypatch.setattr(vae_stage, "POOL", 2)
    monkeypatch.setattr(vae_stage, "CROP_BATCH", 1)
    monkeypatch.setattr(vae_stage, "_report", lambda run, step: None)
    runs = [
        training.StageRun(work=tmp_path / name, name="vae", steps=4, save_every=2)
        for name in ("unbroken", "resumed")
    ]
    for run in runs:
        run.work.mkdir()
    vae_stage.train_vae(runs[0])

    with monkeypatch.context() as patch:
        save = training.save_atomically

        def save_and_stop(state: dict[str, object], path: Path) -> None:
            save(state, path)
            raise Interrupted

        patch.setattr(training, "save_atomically", save_and_stop)
        with pytest.raises(Interrupted):
            vae_stage.train_vae(runs[1])
    vae_stage.train_vae(runs[1])

    unbroken, resumed = (torch.load(run.checkpoint) for run in runs)
    assert unbroken["step"] == resumed["step"] == 4
    assert all(torch.equal(unbroken["ema"][name], resumed["ema"][name]) for name in unbroken["ema"])
    assert sorted(path.name for path in runs[1].work.iterdir()) == ["vae.pt"]


def test_training_attention_equals_diffusers_attention() -> None:
    """`PlainAttention` gives what diffusers' own processor gives, within 1e-5 at outputs of about 1."""
    torch.manual_seed(0)
    transformer = dit_stage.build_transformer()
    inputs = torch.randn(2, 8, 2, 6, 6), torch.tensor([10.0, 900.0]), torch.randn(2, 7, text.TEXT_DIM)
    with torch.no_grad():
        expected = transformer(*inputs, return_dict=False)[0]
        transformer.set_attn_processor(dit_stage.PlainAttention())
        actual = transformer(*inputs, return_dict=False)[0]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0.0)


def test_a_torch_without_muon_is_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.7 runs the bundled model but cannot train it."""
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(
        RuntimeError, match=r"^training needs torch\.optim\.Muon, which torch .* use torch 2\.9"
    ):
        training.MatrixAndOtherOptimizers([], torch.nn.Linear(1, 1), muon_lr=0.1, adamw_lr=0.1)


@pytest.mark.parametrize(
    ("stage", "missing"), [("dit", "run stage vae first"), ("export", "run stage dit first")]
)
def test_a_stage_without_the_stage_before_it_says_which_to_run(
    tmp_path: Path, stage: str, missing: str
) -> None:
    """Stages can be run one by one; one that lacks its input names the stage that makes it."""
    with pytest.raises(ValueError, match=missing):
        train.main(["--work", str(tmp_path), "--out", str(tmp_path / "model"), "--stages", stage])
