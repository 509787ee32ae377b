"""Other schedulers for a pipeline, by name, with the settings that its model was trained for.

A model predicts a flow or noise ("epsilon"); a scheduler of the other family makes noise of it.
"""

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from runtime.device import Device
from runtime.log import get_logger

logger = get_logger(__name__)

FLOW_SETTINGS = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
ODE, SDE = {"algorithm_type": "dpmsolver++"}, {"algorithm_type": "sde-dpmsolver++"}


@dataclass(frozen=True)
class Choice:
    """A diffusers class and what is set on it beside the model's own settings."""

    cls: str
    settings: dict[str, Any] = field(default_factory=dict)


# DEIS and SA-Solver have flow sigmas too, which end above 0 in diffusers 0.42.1: noise stays in the picture.
FLOW = {
    "euler": Choice("FlowMatchEulerDiscreteScheduler"),
    "heun": Choice("FlowMatchHeunDiscreteScheduler"),
    "lcm": Choice("FlowMatchLCMScheduler"),
    "unipc": Choice("UniPCMultistepScheduler", FLOW_SETTINGS),
    "dpm++": Choice("DPMSolverMultistepScheduler", FLOW_SETTINGS | ODE),
    "dpm++sde": Choice("DPMSolverMultistepScheduler", FLOW_SETTINGS | SDE),
}
EPSILON = {
    "euler": Choice("EulerDiscreteScheduler"),
    "euler-a": Choice("EulerAncestralDiscreteScheduler"),
    "heun": Choice("HeunDiscreteScheduler"),
    "lcm": Choice("LCMScheduler"),
    "unipc": Choice("UniPCMultistepScheduler"),
    "dpm++": Choice("DPMSolverMultistepScheduler", ODE),
    "dpm++sde": Choice("DPMSolverMultistepScheduler", SDE),
    "ddim": Choice("DDIMScheduler"),
    "ddpm": Choice("DDPMScheduler"),
    "pndm": Choice("PNDMScheduler", {"skip_prk_steps": True}),
}
FAMILIES = {"flow": FLOW, "epsilon": EPSILON}
PREDICTS = {"flow": "a flow", "epsilon": "noise"}
SCHEDULERS = (*FLOW, *(name for name in EPSILON if name not in FLOW))
SHIFTS = ("shift", "flow_shift")  # two names of one thing
SIGMA_OPTIONS = (
    *("use_dynamic_shifting", "shift_terminal", "invert_sigmas"),
    *("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"),
)


def check_scheduler(name: str | None, pipeline: str = "WanPipeline") -> None:
    """Raise ValueError unless `name` is None or names a scheduler that this pipeline class of diffusers can
    use."""
    if name is None:
        return
    import diffusers

    cls = getattr(diffusers, pipeline)
    family = family_of(cls)
    if family is None:
        raise ValueError(f"scheduler {name!r} was given; {pipeline} runs with its own only; leave it out")
    lacking = {
        each: _lacks(cls, getattr(diffusers, choice.cls), choice.settings)
        for each, choice in FAMILIES[family].items()
    }
    use = f"use one of {', '.join(each for each, lack in lacking.items() if not lack)}"
    if name not in SCHEDULERS:
        raise ValueError(f"scheduler {name!r} is not known; {use}")
    if name not in lacking:
        raise ValueError(
            f"scheduler {name!r} was given; the model of {pipeline} predicts {PREDICTS[family]}, which it "
            f"does not serve; {use}"
        )
    if lacking[name]:
        raise ValueError(f"scheduler {name!r} was given; {lacking[name]}; {use}")


def with_scheduler(scheduler: Any, name: str) -> Any:
    """A scheduler of the named kind, with those settings of `scheduler` that the model was trained for.

    For a flow model these are the shift, fixed or by the image's size, and the steps of training; for others
    the noise schedule and what is predicted. Raises ValueError for a name that is not for such models, and
    for a setting that the named kind does not have.
    """
    import diffusers

    family = "flow" if is_flow(scheduler) else "epsilon"
    choices = FAMILIES[family]
    if name not in choices:
        why = (
            f"does not serve models that predict {PREDICTS[family]}" if name in SCHEDULERS else "is not known"
        )
        raise ValueError(f"scheduler {name!r} {why}; use one of {', '.join(choices)}")
    cls = getattr(diffusers, choices[name].cls)
    settings = dict(choices[name].settings)
    if family == "flow":
        _check_options(scheduler.config, cls)
        settings[_own_shift(cls)] = shift_of(scheduler)
    return _from_config(cls, scheduler.config, settings)


def with_flow_settings(pipeline: Any, scheduler: Any) -> Any:
    """The scheduler to set on a pipeline: `scheduler`, or one like it with what `from_config` has lost.

    diffusers has two names for the shift, and the classes that serve both families start as epsilon ones, so
    `X.from_config(pipe.scheduler.config)` drops the flow settings in silence. Raises ValueError for a setting
    of the sigmas that the class does not have.
    """
    cls, config = type(scheduler), getattr(scheduler, "config", {})
    if family_of(type(pipeline)) != "flow" or not supports_flow(cls):
        return scheduler
    _check_options(config, cls)
    lost = [name for name in SHIFTS if name in config and name not in _parameters(cls)]
    if not lost:
        return scheduler
    wanted = {_own_shift(cls): config[lost[0]], **FLOW_SETTINGS}
    defaults = config.get("_use_default_values", ())
    settings = {n: v for n, v in wanted.items() if n in _parameters(cls) and n in defaults}
    if not settings:
        return scheduler
    told = ", ".join(f"{name}={value}" for name, value in settings.items())
    logger.info("scheduler: %s with %s, kept from the one that its config is from", cls.__name__, told)
    return _from_config(cls, config, settings)


def check_pipeline(pipeline: Any) -> None:
    """Raise ValueError, naming the class, unless the pipeline's scheduler is one for what its model predicts.

    All ranks must hold the same scheduler.
    """
    name = type(pipeline).__name__
    scheduler: Any = getattr(pipeline, "scheduler", None)
    family = family_of(type(pipeline))
    if family is None or not hasattr(scheduler, "config"):
        return
    cls = type(scheduler)
    set_up = f"{cls.__name__} is set as the scheduler of {name}, whose model predicts {PREDICTS[family]}; "
    advice = f"; take another class, or with_scheduler with one of {', '.join(FAMILIES[family])}"
    if family == "epsilon":
        if is_flow(scheduler):
            raise ValueError(f"{set_up}it is one for models that predict a flow{advice}")
        return
    if not supports_flow(cls):
        raise ValueError(f"{set_up}it has no use_flow_sigmas, so it does not serve such models{advice}")
    if "use_flow_sigmas" in _parameters(cls) and not is_flow(scheduler):
        found = ", ".join(f"{n}={scheduler.config[n]!r}" for n in FLOW_SETTINGS)
        asked = ", ".join(f"{n}={v!r}" for n, v in FLOW_SETTINGS.items())
        raise ValueError(f"{set_up}it has {found}; make it with {asked} and the model's flow_shift")
    if lack := _lacks(type(pipeline), cls, scheduler.config):
        raise ValueError(f"{lack}{advice}")
    if _passes_mu(type(pipeline)) and _takes_exponential_mu_only(cls):
        settings = scheduler.config["use_dynamic_shifting"], scheduler.config["time_shift_type"]
        if settings != (True, "exponential"):
            raise ValueError(
                f"{name} passes a shift by image size (mu) to {cls.__name__}, which takes it with "
                "use_dynamic_shifting=True and time_shift_type='exponential' only; it has "
                f"{settings[0]} and {settings[1]!r}{advice}"
            )


@contextmanager
def scheduler_kept(pipeline: Any) -> Iterator[None]:
    """A call leaves the scheduler's settings as they were, and after an error all of its state.

    Some classes write to their own config when they set up steps (DPM-Solver's shift by image size, its
    single-step form's last step; diffusers 0.42.1), so the next call would start from another.
    """
    scheduler: Any = getattr(pipeline, "scheduler", None)
    if not hasattr(scheduler, "config"):
        yield
        return
    config: Any = scheduler._internal_dict
    attributes, state = dict(vars(config)), copy.deepcopy(vars(scheduler))
    try:
        yield
    except BaseException:
        vars(scheduler).clear()
        vars(scheduler).update(state)
        raise
    finally:
        vars(config).update(attributes)  # past its guard, which these classes get past too
        scheduler._internal_dict = config


@contextmanager
def solved_there(pipeline: Any, device: Device) -> Iterator[None]:
    """A scheduler's steps solve their equations on a device that lacks torch.linalg.solve, not on the host.

    UniPC has as many of them as its order, 2 or 3 (diffusers 0.42.1). A `step` of the user's own is left.
    """
    scheduler: Any = getattr(pipeline, "scheduler", None)
    if device.supports_solve or not hasattr(scheduler, "step") or "step" in vars(scheduler):
        yield
        return
    step = type(scheduler).step

    @functools.wraps(step)
    def step_there(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Inverse():
            return step(self, *args, **kwargs)

    scheduler.step = MethodType(step_there, scheduler)  # a method, so that a copy steps by itself
    try:
        yield
    finally:
        del scheduler.step


class _Inverse(TorchFunctionMode):
    """torch.linalg.solve by the inverse."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.linalg.solve:
            return func(*args, **(kwargs or {}))
        matrix, right = args
        return torch.inverse(matrix) @ right


def is_flow(scheduler: Any) -> bool:
    """Whether a scheduler, as it is set up, is one for models that predict a flow."""
    cls, config = type(scheduler), scheduler.config
    if "use_flow_sigmas" in _parameters(cls):
        return all(config[name] == value for name, value in FLOW_SETTINGS.items())
    return supports_flow(cls) and "shift" in _parameters(cls)


def supports_flow(cls: type) -> bool:
    """Whether a scheduler class can serve models that predict a flow."""
    takes = _parameters(cls)
    return "use_flow_sigmas" in takes or not takes & {"prediction_type", "beta_start", "trained_betas"}


def shift_of(scheduler: Any) -> float:
    """The shift of a flow scheduler, also one that was set on it later."""
    return vars(scheduler).get("_shift") or scheduler.config[_own_shift(type(scheduler))]


def family_of(pipeline: type) -> str | None:
    """What the model of a pipeline class predicts, by the scheduler that the class is written for.

    None where that does not tell: a class that serves both, or one made for this pipeline alone.
    """
    parameter = inspect.signature(pipeline.__init__).parameters.get("scheduler")
    kind = getattr(parameter, "annotation", None)
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    if name.startswith("FlowMatch"):
        return "flow"
    return "epsilon" if name in ("KarrasDiffusionSchedulers", "DDIMScheduler", "PNDMScheduler") else None


def makes_sigmas(pipeline: type) -> bool:
    """Whether a pipeline class always hands sigmas of its own to its scheduler; read from the names that its
    call uses."""
    names = _names_in_call(pipeline)
    return any("linspace" in name or (name.startswith("get_default") and "sigmas" in name) for name in names)


def _lacks(pipeline: type, cls: type, settings: Any) -> str:
    """What a scheduler class lacks that the pipeline class needs, as a part of a sentence; "" if nothing."""
    left_out = "use_flow_sigmas" in _names_in_call(pipeline) and settings.get("use_flow_sigmas")
    takes = inspect.signature(cls.set_timesteps).parameters  # type: ignore[attr-defined]
    if makes_sigmas(pipeline) and not left_out and "sigmas" not in takes:
        return f"{pipeline.__name__} sets its own sigmas, which {cls.__name__} does not take"
    # UniPC shifts what it is given by arithmetic on arrays (diffusers 0.42.1).
    if _hands_a_list(pipeline) and {"use_flow_sigmas", "flow_shift"} <= _parameters(cls):
        return f"{pipeline.__name__} hands its sigmas over as a list, which {cls.__name__} cannot shift"
    return ""


def _hands_a_list(pipeline: type) -> bool:
    return "get_default_z_image_sigmas" in _names_in_call(pipeline)


def _passes_mu(pipeline: type) -> bool:
    code = inspect.unwrap(pipeline.__call__).__code__  # type: ignore[operator]
    always = "use_dynamic_shifting" not in code.co_consts
    return always and bool({"calculate_shift", "compute_empirical_mu"} & set(code.co_names))


def _takes_exponential_mu_only(cls: type) -> bool:
    takes = inspect.signature(cls.set_timesteps).parameters  # type: ignore[attr-defined]
    return "flow_shift" in _parameters(cls) and "mu" in takes and "sigmas" not in takes


def _names_in_call(pipeline: type) -> tuple[str, ...]:
    code = inspect.unwrap(pipeline.__call__).__code__  # type: ignore[operator]
    return (
        *code.co_names,
        *(const for const in code.co_consts if isinstance(const, str) and " " not in const),
    )


def _check_options(config: Any, cls: type) -> None:
    """Raise ValueError for an option of the sigmas that is on and that a scheduler class does not have."""
    for option in SIGMA_OPTIONS:
        if config.get(option) and option not in _parameters(cls):
            raise ValueError(
                f"{cls.__name__} has no {option}, which the model's scheduler has at {config[option]}; "
                "take another class"
            )


def _from_config(cls: Any, config: Any, settings: dict[str, Any]) -> Any:
    """A scheduler with settings, and the rest from a config without its shift, whatever the name of that."""
    return cls.from_config({n: v for n, v in config.items() if n not in SHIFTS}, **settings)


def _own_shift(cls: type) -> str:
    return "flow_shift" if "flow_shift" in _parameters(cls) else "shift"


def _parameters(cls: type) -> set[str]:
    return set(inspect.signature(cls.__init__).parameters)
