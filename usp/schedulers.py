"""Other schedulers for flow models, with the flow settings carried over."""

from typing import Any

SCHEDULERS = {  # name -> (diffusers class, what makes it a flow scheduler)
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}),
    "dpm++": ("DPMSolverMultistepScheduler", {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}),
}


def check_scheduler(name: str | None) -> None:
    """Raise ValueError unless `name` is None or one of SCHEDULERS."""
    if name is not None and name not in SCHEDULERS:
        raise ValueError(f"scheduler {name!r} is not known; use one of {', '.join(SCHEDULERS)}")


def with_scheduler(scheduler: Any, name: str) -> Any:
    """A scheduler of the named kind with the flow settings and the shift of `scheduler`."""
    import diffusers

    check_scheduler(name)
    class_name, flow = SCHEDULERS[name]
    config = scheduler.config
    shift = config.get("flow_shift") or config.get("shift") or 1.0
    train_steps = config.get("num_train_timesteps", 1000)
    shift_name = "flow_shift" if flow else "shift"
    return getattr(diffusers, class_name)(num_train_timesteps=train_steps, **{shift_name: shift}, **flow)
