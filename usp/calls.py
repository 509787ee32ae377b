"""A call at the diffusers border: its arguments by name, one progress bar, plain values in the result."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from usp.deferred import concrete


def bind_call(pipeline: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by name. Raises ValueError that names an unknown one."""
    signature = inspect.signature(pipeline.__call__)
    try:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise ValueError(f"{type(pipeline).__name__}: {error}; its call takes {signature}") from error
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


@contextmanager
def one_progress_bar(pipeline: Any, shown: bool) -> Iterator[None]:
    """The pipeline's progress bar on rank 0 alone, however the user has set it up."""
    kept = getattr(pipeline, "_progress_bar_config", None)
    if shown or not hasattr(pipeline, "set_progress_bar_config"):
        yield
        return
    pipeline.set_progress_bar_config(**{**(kept or {}), "disable": True})
    try:
        yield
    finally:
        if kept is None:
            del pipeline._progress_bar_config
        else:
            pipeline.set_progress_bar_config(**kept)


def with_values(result: Any) -> Any:
    """A pipeline's result with plain tensors, where a branch's value was not needed until now."""
    if isinstance(result, dict):  # a diffusers output
        for name, value in result.items():
            result[name] = concrete(value)
        return result
    return concrete(result)
