"""Which guidance branch a forward belongs to: the name that the pipeline gives to the model's
`cache_context`, or, where it gives none, the place of the forward in its step."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Branches:
    """Watches one model's `cache_context`; `current` is the branch at hand.

    Outside of any context the first forward of a step is "", the second "forward 2", and so on, where the
    steps are told (`begin_call`, `end_step`), on all ranks alike; all are "" where they are not, or where the
    pipeline stacks its branches (`stacked`). The values of the arguments `told_apart_by`, where a forward has
    them, are part of the name. The model's own context is entered as before. `close()` takes the watch off.
    """

    def __init__(
        self, model: nn.Module, told_apart_by: tuple[str, ...] = (), *, stacked: bool = False
    ) -> None:
        self._model, self._told_apart_by = model, told_apart_by
        self._context = self._arguments = ""
        self.steps_told = False
        self.unnamed = 0  # forwards outside of any context since a step, or the call, was told to begin
        self._watched = hasattr(model, "cache_context")
        if self._watched:
            model.cache_context = self._wrap(model.cache_context)  # type: ignore[assignment]
        self._handles = [] if stacked else [model.register_forward_pre_hook(self._count)]
        if told_apart_by:
            look = self._look(inspect.signature(model.forward))
            self._handles.append(model.register_forward_pre_hook(look, prepend=True, with_kwargs=True))

    @property
    def named(self) -> bool:
        """Whether the pipeline itself names the forward at hand."""
        return self._context != ""

    @property
    def current(self) -> str:
        """The branch of the forward at hand."""
        place = f"forward {self.unnamed}" if self.steps_told and self.unnamed > 1 else ""
        return f"{self._context or place} {self._arguments}".strip()

    def begin_call(self, *, steps_told: bool) -> None:
        """A call begins; `steps_told` says that `end_step` is to follow each of its steps."""
        self.steps_told, self.unnamed = steps_told, 0

    def end_step(self) -> None:
        """The next forward is the first of its step."""
        self.unnamed = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For the user's own forwards within a call: they are of a branch "callback", and not counted."""
        previous, self._context = self._context, "callback"
        try:
            yield
        finally:
            self._context = previous

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.unnamed += not self._context

    def _look(self, signature: inspect.Signature) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = signature.bind(*args, **kwargs).arguments
            values = [(n, given[n]) for n in self._told_apart_by if given.get(n) is not None]
            self._arguments = " ".join(f"{name}={value}" for name, value in values)

        return hook

    def _wrap(self, original: Any) -> Any:
        @contextmanager
        def cache_context(name: str, **where: Any) -> Iterator[None]:
            previous, self._context = self._context, name
            try:
                with original(name, **where):
                    yield
            finally:
                self._context = previous

        return cache_context

    def close(self) -> None:
        """Give the model its own `cache_context` back. May be called again."""
        if self._watched:
            del self._model.cache_context
            self._watched = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
