"""A stand-in for torch_musa: the module behind torch.musa over device.cpp's device, and the backend mccl.

Names and behaviour as in torch_musa 2.7.1; what is not here is not used by this project.
"""

import ctypes
import os
from typing import Any

import torch

_cards = ctypes.CDLL(os.environ["SIMULATED_MUSA_LIBRARY"])
for _name in ("card_memory", "memory_used", "memory_peak"):
    getattr(_cards, _name).restype = ctypes.c_size_t

__version__ = torch.__version__.split("+")[0]
OutOfMemoryError = torch.OutOfMemoryError


class _Properties:
    def __init__(self) -> None:
        self.name, self.total_memory = "simulated MTT", int(_cards.card_memory())


class device:
    """Make a card current for the body."""

    def __init__(self, index: int) -> None:
        self._index, self._before = index, 0

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *error: object) -> None:
        set_device(self._before)


def _index(card: Any) -> int:
    if card is None:
        return current_device()
    return card if isinstance(card, int) else (torch.device(card).index or 0)


def is_available() -> bool:
    """Whether there is a card."""
    return device_count() > 0


def device_count() -> int:
    """How many cards there are."""
    return int(_cards.card_count())


def current_device() -> int:
    """The calling thread's card."""
    return int(_cards.current_card())


def set_device(card: Any) -> None:
    """Make a card the calling thread's."""
    if _cards.set_card(_index(card)):
        raise RuntimeError(f"invalid MUSA device ordinal {card}")


def synchronize(card: Any = None) -> None:
    """Work is done when its call returns."""


def empty_cache() -> None:
    """Nothing is cached."""


def mem_get_info(card: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    total = int(_cards.card_memory())
    return total - memory_allocated(card), total


def memory_allocated(card: Any = None) -> int:
    """Bytes in use."""
    return int(_cards.memory_used(_index(card)))


def max_memory_allocated(card: Any = None) -> int:
    """The most bytes in use since the last reset."""
    return int(_cards.memory_peak(_index(card)))


def reset_peak_memory_stats(card: Any = None) -> None:
    """Start the peak afresh."""
    _cards.reset_peak(_index(card))


def get_device_properties(card: Any = None) -> _Properties:
    """Name and memory."""
    return _Properties()


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may use."""
    return [torch.float16, torch.bfloat16]


def manual_seed(seed: int) -> None:
    """Seed this card's generator."""
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all cards' generators."""
    for generator in default_generators:
        generator.manual_seed(seed)


def get_rng_state(card: Any = None) -> torch.Tensor:
    """The state of a card's generator."""
    return default_generators[_index(card)].get_state()


def set_rng_state(state: torch.Tensor, card: Any = None) -> None:
    """Set the state of a card's generator."""
    default_generators[_index(card)].set_state(state)


def _is_in_bad_fork() -> bool:
    return False


torch.utils.rename_privateuse1_backend("musa")
torch._register_device_module("musa", __import__("sys").modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
default_generators = [torch.Generator(f"musa:{i}") for i in range(device_count())]

import torch_musa.mccl  # noqa: E402, F401  the backend registers itself
