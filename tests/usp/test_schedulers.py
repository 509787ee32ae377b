"""Another scheduler keeps the model's flow settings and its shift."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from tests import tiny
from usp.schedulers import SCHEDULERS, check_scheduler, with_scheduler

# diffusers 0.42's DPM++ hands a tensor to numpy 2, which wants a keyword of __array__ that torch lacks.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
NAMES = pytest.mark.parametrize("name", SCHEDULERS)


def sources(shift: float) -> list[Any]:
    """The schedulers that Wan repositories bring, with this shift."""
    return [FlowMatchEulerDiscreteScheduler(shift=shift), UniPCMultistepScheduler(**FLOW, flow_shift=shift)]


def sigmas(scheduler: Any, steps: int) -> np.ndarray:
    """The sigmas of a run, each once and without the final 0, in float64."""
    scheduler.set_timesteps(steps)
    *found, last = scheduler.sigmas.double().tolist()
    assert last == 0
    return np.array(sorted(set(found), reverse=True))


@NAMES
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("source", [0, 1])
def test_sigmas_follow_the_closed_formula(name, shift, source):
    """Requirement 29: sigma = shift s / (1 + (shift - 1) s) over evenly spaced s, from 1 downwards."""
    scheduler = with_scheduler(sources(shift)[source], name)
    found = sigmas(scheduler, 7)
    assert len(found) == 7
    s = found / (shift - (shift - 1) * found)
    even = np.linspace(s[0], s[-1], 7)
    assert s[0] == pytest.approx(1, abs=2e-3), "DPM++ starts one training step below 1"
    assert 0 < s[-1] < 0.2
    assert s == pytest.approx(even, abs=1e-4), "float32 sigmas"
    assert scheduler.config.num_train_timesteps == 1000


@NAMES
def test_flow_settings_are_carried_over(name):
    """Requirement 29: the kind that was named, predicting flow, with the source's shift and steps."""
    source = UniPCMultistepScheduler(**FLOW, flow_shift=4.0, num_train_timesteps=500)
    made = with_scheduler(source, name)
    class_name, flow = SCHEDULERS[name]
    assert type(made).__name__ == class_name
    assert made is not source
    assert {key: made.config[key] for key in flow} == flow
    assert made.config["flow_shift" if flow else "shift"] == 4.0
    assert made.config.num_train_timesteps == 500


@NAMES
def test_a_second_setup_gives_the_same_sigmas(name):
    """Requirement 29: set_timesteps again, also after another count, gives the same bits."""
    scheduler = with_scheduler(sources(3.0)[1], name)
    scheduler.set_timesteps(7)
    first = scheduler.sigmas.clone(), scheduler.timesteps.clone()
    scheduler.set_timesteps(3)
    assert not torch.equal(scheduler.sigmas[:4], first[0][:4])
    scheduler.set_timesteps(7)
    assert torch.equal(scheduler.sigmas, first[0])
    assert torch.equal(scheduler.timesteps, first[1])


@NAMES
def test_changing_back_and_forth_keeps_the_shift(name):
    """Through every other kind and back: the sigmas are what they were."""
    direct = with_scheduler(sources(5.0)[0], name)
    made = direct
    for other in [*SCHEDULERS, name]:
        made = with_scheduler(made, other)
    assert sigmas(made, 5) == pytest.approx(sigmas(direct, 5), abs=0)


@NAMES
def test_each_scheduler_runs_a_pipeline(name):
    """Three steps of a Wan pipeline: finite, and the same bits when run again after another count."""
    pipeline = tiny.build("t2v")
    pipeline.scheduler = with_scheduler(pipeline.scheduler, name)
    call = tiny.call("t2v", num_inference_steps=3)

    def latents(steps: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.as_tensor(pipeline(**{**call, "num_inference_steps": steps}, generator=generator).frames)

    first = latents(3)
    assert torch.isfinite(first).all()
    latents(2)
    assert torch.equal(latents(3), first)


def test_an_unknown_name_is_refused():
    """The known names follow, from the check and from the change itself."""
    message = r"^scheduler 'ddim' is not known; use one of euler, heun, unipc, dpm\+\+$"
    with pytest.raises(ValueError, match=message):
        check_scheduler("ddim")
    with pytest.raises(ValueError, match=message):
        with_scheduler(sources(3.0)[0], "ddim")


@pytest.mark.parametrize("name", [None, *SCHEDULERS])
def test_known_names_and_none_pass(name):
    """None leaves the model's own."""
    check_scheduler(name)
