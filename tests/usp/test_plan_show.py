"""`python -m usp.plan show`: a plan and what it matches, from a class name or a folder."""

import json
import runpy
import sys

import pytest
from typer.testing import CliRunner

from tests.usp.models import MODELS, SPREAD
from usp.demo import MODEL_DIR
from usp.plan.__main__ import app


def show(model) -> tuple[int, str]:
    """The exit code, and all that was printed with runs of spaces as one."""
    result = CliRunner().invoke(app, ["show", str(model)])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("name", MODELS)
def test_every_plan_is_shown_for_its_class(name, tmp_path):
    """Each entry is printed with the modules that it names, for a folder that holds a model's config."""
    MODELS[name].build().save_config(tmp_path)
    code, text = show(tmp_path)
    assert code == 0, text
    assert f"{name}: " in text
    if name in SPREAD:
        assert "attend over" in text
        assert "gather tokens" in text


def test_a_class_is_shown_by_its_default_config():
    """40 blocks of Wan 14B, without weights: a run of modules as one, and which axis of what is cut."""
    code, text = show("WanTransformer3DModel")
    assert code == 0
    assert "attend over tokens scaled_dot_product_attention blocks.0-39.attn1 (40 modules)" in text
    assert "split tokens timestep, 2 dims: axis 1 the model" in text
    assert "guidance branches one forward each, by name; a first-block cache works on blocks." in text


def test_what_matches_nothing_in_this_configuration_is_said():
    """SD 3.5 large has no second attention; its plan's optional entry says so."""
    _, text = show("SD3Transformer2DModel")
    assert "transformer_blocks.*.attn2: none in this model" in text


def test_a_pipeline_folder_shows_its_transformers():
    """The bundled pipeline: its transformer, found beside components without a plan."""
    code, text = show(MODEL_DIR)
    assert code == 0
    assert "WanTransformer3DModel" in text
    assert "blocks.0" in text


def test_what_cannot_be_shown_is_one_sentence(tmp_path):
    """Req 40: an unknown class lists those with plans, and how to add one; a folder what it holds."""
    code, text = show("ChromaTransformer2DModel")
    assert code == 2
    assert "'ChromaTransformer2DModel' was asked for; it is no folder here, and no class with a plan" in text
    assert "FluxTransformer2DModel, " in text
    assert "write usp/plans/<family>.py and list it in usp/plans/__init__.py" in text
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    code, text = show(tmp_path)
    assert code == 2
    assert "in it and below name AutoencoderKL, and there are plans for" in text


def test_the_command_is_spelled_as_documented(monkeypatch, capsys):
    """`python -m usp.plan show MODEL` runs the command."""
    monkeypatch.setattr(sys, "argv", ["usp.plan", "show", "UNet2DConditionModel"])
    monkeypatch.delitem(sys.modules, "usp.plan.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("usp.plan", run_name="__main__")
    assert ended.value.code == 0
    assert "its batch is cut over cfg ranks" in capsys.readouterr().out
