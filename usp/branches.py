"""Which guidance branch a forward belongs to: the name that the pipeline gives to the model's
`cache_context`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Branches:
    """Watches one model's `cache_context`; `current` is the branch at hand, "" outside of any.

    The model's own context is entered as before. `close()` takes the watch off again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.current = ""
        self._model = model
        self._watched = hasattr(model, "cache_context")
        if self._watched:
            model.cache_context = self._wrap(model.cache_context)  # type: ignore[assignment]

    def _wrap(self, original: Any) -> Any:
        @contextmanager
        def cache_context(name: str, **where: Any) -> Iterator[None]:
            previous, self.current = self.current, name
            try:
                with original(name, **where):
                    yield
            finally:
                self.current = previous

        return cache_context

    def close(self) -> None:
        """Give the model its own `cache_context` back. May be called again."""
        if self._watched:
            del self._model.cache_context
            self._watched = False
