"""Run diffusion transformers on several devices and get the same picture as on one.

`ParallelPipeline` is the way in; it is imported on first use so that `import usp` stays cheap.
"""

from typing import TYPE_CHECKING, Any

from usp.config import ParallelConfig

if TYPE_CHECKING:
    from usp.pipeline import ParallelPipeline

__all__ = ["ParallelConfig", "ParallelPipeline"]


def __getattr__(name: str) -> Any:
    if name == "ParallelPipeline":
        from usp.pipeline import ParallelPipeline

        return ParallelPipeline
    raise AttributeError(f"module 'usp' has no attribute {name!r}")
