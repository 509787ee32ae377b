"""Attention over a sequence that several ranks share; `sequence_attention` composes it from a config."""

from usp.attention.compose import SequenceAttention
from usp.attention.gather_kv import gather_kv
from usp.attention.ring import ring
from usp.attention.ulysses import ulysses

__all__ = ["SequenceAttention", "gather_kv", "ring", "ulysses"]
