"""What a diffusers folder's model_index.json lists."""

from collections.abc import Mapping
from typing import Any


def components_in(index: Mapping[str, Any]) -> list[str]:
    """The names of the components that are there; one that was left out has no class, (None, None)."""
    return [name for name, value in index.items() if isinstance(value, list) and value[0]]
