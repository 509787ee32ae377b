"""What ranks on simulated devices run. Imported by the server before it forks, so that every rank has it."""

import torch
import torch.distributed as dist

from tests.usp import in_ranks, test_attention  # noqa: F401  the bodies that CPU ranks run, too


def device() -> torch.device:
    """This rank's device."""
    return torch.device("npu", torch.npu.current_device())


def count(size: int = 0) -> tuple[str, int, str]:
    """What this rank sees."""
    return str(device()), torch.npu.device_count(), dist.get_backend() if dist.is_initialized() else ""
