"""Another scheduler keeps what the model was trained for, draws alike on all ranks, and leaves no trace."""

import copy
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusionPipeline, UniPCMultistepScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.device import Device
from tests import tiny
from tests.usp.in_ranks import SEED, alone, error_of, rank
from usp.demo import tiny as tiny_models
from usp.pipeline import ParallelPipeline
from usp.schedulers import (
    EPSILON,
    FAMILIES,
    FLOW,
    FLOW_SETTINGS,
    check_pipeline,
    check_scheduler,
    family_of,
    makes_sigmas,
    scheduler_kept,
    solved_there,
    with_scheduler,
)

# diffusers 0.42's DPM++ hands a tensor to numpy 2, which wants a keyword of __array__ that torch lacks.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

TOLERANCE = 1e-5  # two ranks against one, see test_pipeline.py
NAMES = pytest.mark.parametrize("name", FLOW)
STOCHASTIC = ("lcm", "dpm++sde", "stochastic euler")
NOISE_SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
BY_SIZE = {"use_dynamic_shifting": True, "base_shift": 0.4, "max_shift": 1.3, "max_image_seq_len": 8192}


def sources(shift: float) -> list[Any]:
    """The schedulers that Wan repositories bring, with this shift."""
    return [
        FlowMatchEulerDiscreteScheduler(shift=shift),
        UniPCMultistepScheduler(**FLOW_SETTINGS, flow_shift=shift),
    ]


def sigmas(scheduler: Any, steps: int, **how: Any) -> np.ndarray:
    """The sigmas of a run, each once and without the final 0, in float64."""
    scheduler.set_timesteps(steps, **how)
    *found, last = scheduler.sigmas.double().tolist()
    assert last == 0
    return np.array(sorted(set(found), reverse=True))


def made(name: str, shift: float = 3.0) -> Any:
    """A flow scheduler by name; one more name than the command line has."""
    if name == "stochastic euler":
        return FlowMatchEulerDiscreteScheduler(shift=shift, stochastic_sampling=True)
    return with_scheduler(sources(shift)[0], name)


@NAMES
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("source", [0, 1])
def test_sigmas_follow_the_closed_formula(name, shift, source):
    """B27, req 29: sigma = shift s / (1 + (shift - 1) s) over evenly spaced s, from 1 downwards."""
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
    """B26, req 29: the kind that was named, predicting flow, with the source's shift and steps."""
    source = UniPCMultistepScheduler(**FLOW_SETTINGS, flow_shift=4.0, num_train_timesteps=500)
    found = with_scheduler(source, name)
    choice = FLOW[name]
    assert type(found).__name__ == choice.cls
    assert found is not source
    assert {key: found.config[key] for key in choice.settings} == choice.settings
    assert found.config["flow_shift" if choice.settings else "shift"] == 4.0
    assert found.config.num_train_timesteps == 500


@NAMES
def test_b27_a_second_setup_gives_the_same_sigmas(name):
    """B27, req 29: set_timesteps again, after another count, and on a copy by from_config: the same bits."""
    scheduler = made(name, shift=5.0)
    scheduler.set_timesteps(4)
    first = scheduler.sigmas.clone(), scheduler.timesteps.clone()
    scheduler.set_timesteps(3)
    assert not torch.equal(scheduler.sigmas[:3], first[0][:3])
    for again in (scheduler, type(scheduler).from_config(scheduler.config)):
        again.set_timesteps(4)
        assert torch.equal(again.sigmas, first[0])
        assert torch.equal(again.timesteps, first[1])


@NAMES
def test_changing_back_and_forth_keeps_the_shift(name):
    """Through every other kind and back: the sigmas are what they were; a shift changed on the way lasts."""
    direct = made(name, shift=5.0)
    found = direct
    for other in [*FLOW, name]:
        found = with_scheduler(found, other)
    assert sigmas(found, 5) == pytest.approx(sigmas(direct, 5), abs=0)
    set_later = sources(3.0)[0]
    set_later.set_shift(5.0)
    assert sigmas(with_scheduler(set_later, name), 5) == pytest.approx(sigmas(direct, 5), abs=0)
    changed = UniPCMultistepScheduler.from_config(made("unipc").config, flow_shift=5.0)
    assert sigmas(with_scheduler(changed, name), 5) == pytest.approx(sigmas(direct, 5), abs=0)


@pytest.mark.parametrize("name", ["euler", "lcm", "unipc", "dpm++", "dpm++sde"])
def test_a_shift_by_image_size_is_carried_over(name):
    """B26: set up as FluxPipeline does it, sigma = e^mu / (e^mu + 1/s - 1), mu from the source's config."""
    scheduler = with_scheduler(FlowMatchEulerDiscreteScheduler(**BY_SIZE), name)
    config = scheduler.config
    mu = calculate_shift(
        2000,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    assert mu == pytest.approx(0.4 + (2000 - 256) * (1.3 - 0.4) / (8192 - 256))
    given = None if config.get("use_flow_sigmas") else np.linspace(1.0, 1 / 4, 4)
    retrieve_timesteps(scheduler, 4, "cpu", sigmas=given, mu=mu)
    found = scheduler.sigmas[:-1].double().numpy()
    s = 1 / (1 + np.exp(mu) * (1 / found - 1))
    assert s[0] == pytest.approx(1, abs=2e-3)
    assert s == pytest.approx(np.linspace(s[0], s[-1], 4), abs=1e-4)


def test_a_setting_that_a_class_does_not_have_is_refused_by_name():
    """B26: a shift by image size, or a last sigma, is not dropped in silence."""
    for option, value, name in (("use_dynamic_shifting", True, "heun"), ("shift_terminal", 0.02, "dpm++")):
        with pytest.raises(
            ValueError, match=f"^{FLOW[name].cls} has no {option}, which the model's schedule"
        ):
            with_scheduler(FlowMatchEulerDiscreteScheduler(**{option: value}), name)


@pytest.mark.parametrize("name", EPSILON)
def test_noise_schedules_are_carried_over(name):
    """Req 29: SD 1.5's betas and offset, and a v model's prediction; a second setup gives the same steps."""
    source = diffusers.PNDMScheduler(**NOISE_SCHEDULE, prediction_type="v_prediction")
    scheduler = with_scheduler(source, name)
    assert type(scheduler).__name__ == EPSILON[name].cls
    for key, value in {**NOISE_SCHEDULE, "prediction_type": "v_prediction"}.items():
        assert scheduler.config[key] == value
    assert torch.equal(scheduler.alphas_cumprod, source.alphas_cumprod)
    scheduler.set_timesteps(5)
    first = scheduler.timesteps.clone()
    scheduler.set_timesteps(3)
    scheduler.set_timesteps(5)
    assert torch.equal(scheduler.timesteps, first)


@pytest.mark.parametrize(
    ("pipeline", "family", "own_sigmas", "usable"),
    [
        ("WanPipeline", "flow", False, tuple(FLOW)),
        ("WanImageToVideoPipeline", "flow", False, tuple(FLOW)),
        ("StableDiffusion3Pipeline", "flow", False, tuple(FLOW)),
        ("FluxPipeline", "flow", True, ("euler", "lcm", "unipc", "dpm++", "dpm++sde")),
        ("Flux2Pipeline", "flow", True, ("euler", "lcm", "unipc", "dpm++", "dpm++sde")),
        ("QwenImagePipeline", "flow", True, ("euler", "lcm", "unipc")),
        ("QwenImageEditPlusPipeline", "flow", True, ("euler", "lcm", "unipc")),
        ("ZImagePipeline", "flow", True, ("euler", "lcm")),
        ("StableDiffusionPipeline", "epsilon", False, tuple(EPSILON)),
        ("CogVideoXPipeline", None, False, ()),
    ],
)
def test_each_pipeline_takes_the_schedulers_of_its_kind(pipeline, family, own_sigmas, usable):
    """B26: by the installed class, before weights are read: what its model predicts, and who sets sigmas."""
    cls = getattr(diffusers, pipeline)
    assert family_of(cls) == family
    assert makes_sigmas(cls) == own_sigmas
    check_scheduler(None, pipeline)
    names = {*FLOW, *EPSILON}
    assert {name for name in names if not error_of(check_scheduler, name, pipeline)} == set(usable)


def test_a_scheduler_that_is_offered_runs():
    """Each name that Z-Image, whose sigmas are a list, is said to take makes a picture."""
    for name in FLOW:
        pipeline = tiny_models.build("z-image")
        if error_of(check_scheduler, name, "ZImagePipeline"):
            continue
        pipeline.scheduler = with_scheduler(pipeline.scheduler, name)
        call = {**tiny_models.call_arguments("z-image"), "num_inference_steps": 2, "output_type": "latent"}
        assert torch.isfinite(pipeline(**call).images[0]).all(), name


def test_names_that_do_not_fit_are_refused_with_those_that_do():
    """Req 29, 40: an unknown one, one of the other family, one that takes no sigmas; then what to use."""
    flow = "use one of euler, heun, lcm, unipc, dpm++, dpm++sde"
    assert error_of(check_scheduler, "dopri") == f"ValueError: scheduler 'dopri' is not known; {flow}"
    assert error_of(check_scheduler, "ddim", "WanPipeline") == (
        "ValueError: scheduler 'ddim' was given; the model of WanPipeline predicts a flow, which it does not "
        f"serve; {flow}"
    )
    assert error_of(check_scheduler, "heun", "QwenImagePipeline") == (
        "ValueError: scheduler 'heun' was given; QwenImagePipeline sets its own sigmas, which "
        "FlowMatchHeunDiscreteScheduler does not take; use one of euler, lcm, unipc"
    )
    assert error_of(check_scheduler, "euler", "CogVideoXPipeline") == (
        "ValueError: scheduler 'euler' was given; CogVideoXPipeline runs with its own only; leave it out"
    )
    assert error_of(with_scheduler, sources(3.0)[0], "ddim") == (
        f"ValueError: scheduler 'ddim' does not serve models that predict a flow; {flow}"
    )
    assert error_of(with_scheduler, sources(3.0)[0], "dopri").startswith(
        "ValueError: scheduler 'dopri' is not known; use one of euler, heun"
    )


def called_with(names: list[str]) -> list[np.ndarray]:
    """This rank's latents with each scheduler, set through the wrapper."""
    found = []
    with ParallelPipeline(tiny.build("t2v")) as pipe:
        for name in names:
            pipe.scheduler = made(name)
            found.append(pipe(**tiny.call("t2v", num_inference_steps=4), seed=SEED).frames.numpy())
    return found


def test_b26_each_scheduler_on_two_ranks_matches_one_process(ranks):
    """B26, req 29: four steps (Heun takes two forwards for each), SP 2: one process's latents."""
    names = [name for name in FLOW if name not in STOCHASTIC]
    by_rank = ranks(2).run(called_with, names)
    for name, *results in zip(names, *by_rank, strict=True):
        pipeline = tiny.build("t2v")
        pipeline.scheduler = made(name)
        want = alone("t2v", {"num_inference_steps": 4}, pipeline=pipeline)
        assert np.isfinite(want).all()
        for result in results:
            assert np.abs(result - want).max() <= TOLERANCE, name


def test_b04_stochastic_steps_draw_the_same_bits_on_all_ranks(ranks):
    """Req 21: LCM, SDE and stochastic Euler on 1 and 2 ranks: one result, repeated by its seed."""
    names = [*STOCHASTIC, *STOCHASTIC]
    (alone_here,) = ranks(1).run(called_with, names)
    one, other = ranks(2).run(called_with, names)
    for i, name in enumerate(names):
        assert np.array_equal(one[i], other[i]), name
        assert np.abs(one[i] - alone_here[i]).max() <= TOLERANCE, name
        assert np.array_equal(one[i], one[i % 3]), "the same seed gives the same draws"


def first_draws() -> list[torch.Tensor]:
    """The first noise of a call, and the first draw of a scheduler in it."""
    found: list[torch.Tensor] = []

    def callback(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        found.append(torch.randn(1, tiny.CHANNELS, 1, 6, 14))
        return tensors

    with ParallelPipeline(tiny.build("t2v")) as pipe:
        pipe(**tiny.call("t2v", num_inference_steps=1), seed=SEED, callback_on_step_end=callback)
    return [torch.randn(1, tiny.CHANNELS, 1, 6, 14, generator=torch.Generator().manual_seed(SEED)), *found]


def test_a_schedulers_draws_are_not_the_first_noise_again(ranks):
    """Were both drawn from one seed, a stochastic step would add the noise that is in the latents already."""
    for noise, drawn in ranks(2).run(first_draws):
        assert abs(torch.corrcoef(torch.stack([noise.flatten(), drawn.flatten()]))[0, 1]) < 0.2


def by_from_config(chains: list[list[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sigmas, and the latents of a call, after `pipe.scheduler = X.from_config(pipe.scheduler.config)`."""
    found = []
    for chain in chains:
        with ParallelPipeline(tiny.build("t2v")) as pipe:
            for name in chain:
                pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config)
            latents = pipe(**tiny.call("t2v"), seed=SEED).frames.numpy()
            found.append((sigmas(pipe.scheduler, 5), latents))
    return found


def test_b26_from_config_keeps_the_flow_settings_and_the_shift(ranks):
    """B26, B27, req 29: diffusers' own way to swap, which loses them, by either name of the shift."""
    unipc, euler = "UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"
    dpm, heun = "DPMSolverMultistepScheduler", "FlowMatchHeunDiscreteScheduler"
    chains = {"unipc": [unipc], "dpm++": [heun, dpm], "euler": [unipc, euler], "heun": [dpm, unipc, heun]}
    for results in ranks(2).run(by_from_config, list(chains.values())):
        for name, (found, latents) in zip(chains, results, strict=True):
            assert found == pytest.approx(sigmas(made(name), 5), abs=0), name
            pipeline = tiny.build("t2v")
            pipeline.scheduler = made(name)
            assert np.abs(latents - alone("t2v", {}, pipeline=pipeline)).max() <= TOLERANCE, name


def set_wrong() -> list[str]:
    """Errors of a flow model with schedulers that are not for it, set both ways; then a call that works."""
    call = tiny.call("t2v", tokens=(1, 1, 5), num_inference_steps=1)
    texts = []
    with ParallelPipeline(tiny.build("t2v"), timeout_s=20) as pipe:
        good = pipe.scheduler
        wrong = [diffusers.DDIMScheduler(), diffusers.EulerDiscreteScheduler(), UniPCMultistepScheduler()]
        for scheduler in wrong:
            pipe.scheduler = scheduler
            texts.append(error_of(pipe, **call, seed=SEED))
        pipe.pipeline.scheduler = diffusers.DDIMScheduler.from_config(good.config)
        texts.append(error_of(pipe, **call, seed=SEED))
        kept = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        text = error_of(
            setattr, pipe, "scheduler", diffusers.FlowMatchHeunDiscreteScheduler.from_config(kept.config)
        )
        texts.append(text)
        pipe.scheduler = good
        assert not error_of(pipe, **call, seed=SEED)
    return texts


@pytest.mark.parametrize("size", [1, 2])
def test_b26_a_class_without_flow_support_is_refused_by_name(ranks, size):
    """B26, req 29: before the first step, on all ranks, naming the class or the option; no harm is done."""
    for ddim, euler, unipc, behind, by_size in ranks(size).run(set_wrong):
        for text, name in ((ddim, "DDIM"), (euler, "EulerDiscrete"), (behind, "DDIM")):
            assert text.startswith(
                f"ValueError: {name}Scheduler is set as the scheduler of WanPipeline, whose model predicts a "
                "flow; it has no use_flow_sigmas, so it does not serve such models; take another class, or "
            )
        assert unipc == (
            "ValueError: UniPCMultistepScheduler is set as the scheduler of WanPipeline, whose model "
            "predicts a flow; it has use_flow_sigmas=False, prediction_type='epsilon'; make it with "
            "use_flow_sigmas=True, prediction_type='flow_prediction' and the model's flow_shift"
        )
        assert by_size.startswith("ValueError: FlowMatchHeunDiscreteScheduler has no use_dynamic_shifting")


def sd15(scheduler: Any) -> StableDiffusionPipeline:
    """SD 1.5's pipeline with nothing in it but the scheduler."""
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "unet", "safety_checker", "feature_extractor"))
    own = diffusers.PNDMScheduler(**NOISE_SCHEDULE, skip_prk_steps=True)
    pipeline = StableDiffusionPipeline(**parts, scheduler=own, requires_safety_checker=False)
    pipeline.scheduler = scheduler
    return pipeline


def test_a_noise_model_refuses_flow_schedulers_by_name():
    """Req 29: the other way round; and the noise schedulers pass."""
    for scheduler in (*sources(3.0), made("heun")):
        assert error_of(check_pipeline, sd15(scheduler)).startswith(
            f"ValueError: {type(scheduler).__name__} is set as the scheduler of StableDiffusionPipeline, "
            "whose model predicts noise; it is one for models that predict a flow; take another class"
        )
    for name in EPSILON:
        check_pipeline(sd15(with_scheduler(diffusers.PNDMScheduler(**NOISE_SCHEDULE), name)))


def plain(scheduler: Any) -> dict[str, Any]:
    """A scheduler's state and settings, comparable."""
    state = {**vars(scheduler), "config": dict(scheduler.config), "attributes": dict(vars(scheduler.config))}
    return {key: repr(value) for key, value in state.items() if key != "_internal_dict"}


def broken(at: int) -> Any:
    """A callback that fails after a step."""

    def callback(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == at:
            raise OSError("disk full")
        return tensors

    return callback


@pytest.mark.parametrize("name", [*FLOW, "stochastic euler"])
def test_b52_nothing_of_a_call_stays_in_the_scheduler(name):
    """B52, req 27, 29: after calls that failed, and one of another count: a fresh pipeline's bits."""

    def latents(pipeline: Any, steps: int, **more: Any) -> np.ndarray:
        call = tiny.call("t2v", tokens=(1, 1, 3), guidance_scale=1.0, num_inference_steps=steps, **more)
        with ParallelPipeline(pipeline) as pipe:
            return pipe(**call, seed=SEED).frames.numpy()

    pipeline, fresh = tiny.build("t2v"), tiny.build("t2v")
    pipeline.scheduler, fresh.scheduler = made(name), made(name)
    want = latents(fresh, 5)
    for at in (0, 2):
        before = plain(pipeline.scheduler)
        assert error_of(latents, pipeline, 4, callback_on_step_end=broken(at)) == "OSError: disk full"
        assert plain(pipeline.scheduler) == before
        assert np.array_equal(latents(pipeline, 5), want)
    latents(pipeline, 3)
    assert np.array_equal(latents(pipeline, 5), want)


def settings_after(odd: int) -> tuple[bool, bool]:
    """Whether a scheduler that rewrites its own settings has those it had, after a call and after mu."""
    pipeline = tiny.build("t2v")
    pipeline.scheduler = diffusers.DPMSolverSinglestepScheduler(
        **FLOW_SETTINGS, flow_shift=3.0, final_sigmas_type="sigma_min"
    )
    before = copy.deepcopy((dict(pipeline.scheduler.config), dict(vars(pipeline.scheduler.config))))
    own = copy.deepcopy(pipeline.scheduler)
    own.set_timesteps(odd)
    rewritten = (dict(own.config), dict(vars(own.config))) != before
    with ParallelPipeline(pipeline) as pipe:
        pipe(**tiny.call("t2v", tokens=(1, 1, 5), guidance_scale=1.0, num_inference_steps=odd), seed=SEED)
    return rewritten, (dict(pipeline.scheduler.config), dict(vars(pipeline.scheduler.config))) == before


def test_b52_settings_that_a_scheduler_rewrites_are_put_back(ranks):
    """B52: DPM-Solver's single-step form changes its config for an odd count; the next call starts anew."""
    assert ranks(2).run(settings_after, 3) == [(True, True)] * 2


def test_b52_a_shift_by_image_size_does_not_stay():
    """B52: DPM++ writes the shift of one image's size into its config, where the next call would find it."""
    scheduler = with_scheduler(FlowMatchEulerDiscreteScheduler(**BY_SIZE), "dpm++")
    pipeline = tiny.build("t2v")
    pipeline.scheduler = scheduler
    with scheduler_kept(pipeline):
        scheduler.set_timesteps(3, mu=1.0)
        assert scheduler.config.flow_shift == pytest.approx(np.e)
    assert scheduler.config.flow_shift == scheduler.config["flow_shift"] == 1.0


def shifted_on_one_rank() -> str:
    pipeline = tiny.build("t2v")
    if rank() == 1:
        pipeline.scheduler.set_shift(7.0)
    with ParallelPipeline(pipeline, timeout_s=20) as pipe:
        return error_of(pipe, **tiny.call("t2v", tokens=(1, 1, 5)), seed=SEED)


def test_a_shift_set_on_one_rank_is_an_error_on_all(ranks):
    """Req 25: `set_shift` leaves the config alone; the ranks compare it all the same."""
    for text in ranks(2).run(shifted_on_one_rank, timeout_s=60):
        assert text.startswith("ValueError: the scheduler's configuration differs over ranks: rank 0 has ")
        assert "3.0)" in text
        assert "7.0)" in text


def test_every_name_is_a_class_of_the_installed_diffusers():
    """An upgrade that renames a class, or drops a setting, is seen here."""
    for choices in FAMILIES.values():
        for choice in choices.values():
            scheduler = getattr(diffusers, choice.cls)(**choice.settings)
            assert {key: scheduler.config[key] for key in choice.settings} == choice.settings


class Solver(TorchDispatchMode):
    """Counts torch's solver of linear equations."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops.aten._linalg_solve_ex.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", [2, 3])
def test_a_device_without_a_solver_gets_the_same_steps_from_the_inverse(order):
    """UniPC on an NPU: none of torch's solver, latents to roundings; `step` is the scheduler's own again."""
    pipeline, results, calls = tiny.build("t2v"), [], []
    pipeline.scheduler = UniPCMultistepScheduler(**FLOW_SETTINGS, flow_shift=3.0, solver_order=order)
    for device in (Device("cpu"), Device("npu", 0)):
        with solved_there(pipeline, device), Solver() as solver:
            call = tiny.call("t2v", num_inference_steps=6)
            generator = torch.Generator().manual_seed(SEED)
            results.append(np.asarray(pipeline(**call, generator=generator).frames))
        calls.append(solver.calls)
        assert "step" not in vars(pipeline.scheduler)
    assert calls[0] > 0
    assert calls[1] == 0
    assert np.abs(results[0] - results[1]).max() <= 1e-4


def test_an_error_in_a_step_leaves_the_scheduler_its_own():
    """Also where the scheduler's state is put back."""
    pipeline = tiny.build("t2v")

    def fail() -> None:
        with scheduler_kept(pipeline), solved_there(pipeline, Device("npu", 0)):
            raise ValueError(f"step is {'ours' if 'step' in vars(pipeline.scheduler) else 'its own'}")

    assert error_of(fail) == "ValueError: step is ours"
    assert "step" not in vars(pipeline.scheduler)
