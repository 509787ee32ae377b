"""Long-context attention of other installed packages, named as an engine."""

from usp.attention.compose import External
from usp.config import ParallelConfig
from usp.mesh import Groups


def external_attention(config: ParallelConfig, groups: Groups) -> External | None:
    """The attention of `config.engine`, or None for our own."""
    return None
