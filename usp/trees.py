"""Tensors inside lists, tuples and dicts."""

from collections.abc import Callable
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same containers with each tensor in them replaced; anything else stays as it is."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(function, item) for item in tree)
    return tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree of containers, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
