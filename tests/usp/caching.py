"""What the tests of the first-block cache share: a cache on a model, inputs that change, toy models."""

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from tests import tiny
from tests.usp.in_ranks import seeded
from tests.usp.test_attention import cached_groups
from usp.adapter import sharded
from usp.attention import SequenceAttention
from usp.branches import Branches
from usp.cache import cached
from usp.config import CacheConfig, parse_parallel
from usp.mesh import Group
from usp.plan import Blocks, Held, ShardPlan, SplitInput
from usp.plans.wan import WAN

ALONE = Group((0,), 0)
ALWAYS = 10.0  # a threshold that every change is under


@contextmanager
def caching(model, threshold, *, plan=WAN, layout=None, cache_first=False, **policy):
    """A cache on `model`, alone or with its tokens over the ranks of `layout`; closed at the end."""
    branches, made = Branches(model, plan.told_apart_by), {}
    groups = cached_groups(parse_parallel(layout)) if layout else None

    def shard():
        if groups is not None:
            made["shard"] = sharded(model, plan, SequenceAttention(groups))

    if not cache_first:
        shard()
    cache = cached(
        model,
        plan,
        CacheConfig(threshold=threshold, **policy),
        group=groups.sp if groups else ALONE,
        branches=branches,
        share_of=(lambda stream: made["shard"].share_of(stream)) if groups else None,
    )
    if cache_first:
        shard()
    try:
        yield cache
    finally:
        for part in (cache, branches, *made.values()):
            part.close()


def transformer():
    """Three layers: one block before and one behind a block in the middle."""
    return tiny.transformer(num_layers=3)


def half_still(tokens, steps, *, seed=0):
    """One row of tokens over some steps: the first half is constant, the second half moves."""
    inputs = tiny.model_inputs((1, 1, tokens), seed=seed)
    moving = torch.zeros(2 * tokens)
    moving[tokens // 2 * 2 :] = 1.0
    noise = [torch.randn(inputs["hidden_states"].shape, generator=seeded(seed + 1 + k)) for k in range(steps)]
    moves = [0.15 * (1 + k % 3) * n * moving for k, n in enumerate(noise)]
    return [{**inputs, "hidden_states": inputs["hidden_states"] + move} for move in moves]


def call(model, cache, steps, *, name=None):
    """A call of one forward a step: the result of each."""
    cache.begin_call(is_last=lambda done: done == len(steps) - 1)
    results = []
    for step in steps:
        with model.cache_context(name) if name else nullcontext(), torch.no_grad():
            results.append(model(**step).sample)
    cache.end_call()
    return results


def letters(report):
    """A branch's decisions as text: c for computed, s for skipped."""
    return "".join("s" if skipped else "c" for skipped in report.skipped)


class Plain(nn.Module):
    """A block that adds something to its tokens."""

    def __init__(self, place):
        super().__init__()
        self.gain = place + 1.0

    def forward(self, hidden_states):
        return hidden_states + torch.tanh(self.gain * hidden_states)


class InPlace(Plain):
    """The same sum, written over its input."""

    def forward(self, hidden_states):
        return hidden_states.add_(torch.tanh(self.gain * hidden_states))


class Still(Plain):
    """A block without any residual."""

    def forward(self, hidden_states):
        return hidden_states.clone()


class Joint(Plain):
    """A block of two streams that returns (text, picture); the last of three drops the text."""

    def forward(self, hidden_states, encoder_hidden_states):
        both = torch.cat([encoder_hidden_states, hidden_states], dim=1).mean(1, keepdim=True)
        text = None if self.gain == 3.0 else encoder_hidden_states + torch.sin(self.gain * both)
        return text, hidden_states + torch.tanh(self.gain * both)


class Toy(nn.Module):
    """Blocks, and the context that diffusers' models have."""

    def __init__(self, kind, count=3):
        super().__init__()
        self.blocks = nn.ModuleList(kind(place) for place in range(count))

    @contextmanager
    def cache_context(self, name):
        yield

    def forward(self, **states):
        for block in self.blocks:
            output = block(**states)
            if isinstance(output, tuple):
                states["encoder_hidden_states"], output = output
            states["hidden_states"] = output
        return states["hidden_states"]


TOY = ShardPlan(
    model="Toy",
    splits=(SplitInput(module="blocks.0", argument="hidden_states", dim=1, ndim=3),),
    blocks=(Blocks(modules="blocks"),),
)
JOINT = replace(
    TOY,
    blocks=(
        Blocks(
            modules="blocks",
            held=(Held(argument="hidden_states"), Held(argument="encoder_hidden_states", streams=("text",))),
            outputs=("encoder_hidden_states", "hidden_states"),
        ),
    ),
)


def tokens(step):
    """Tokens that drift with the step, (1, 5, 4)."""
    return torch.linspace(-1.0, 1.0, 20).reshape(1, 5, 4) * (1 + 0.1 * step)


def toy_call(model, threshold, steps=6, *, plan=TOY, **options):
    """The results of a toy's forwards on drifting tokens, and the report."""
    with caching(model, threshold, plan=plan, warmup_steps=1, **options) as cache:
        cache.begin_call(is_last=lambda done: done == steps - 1)
        joint = {"encoder_hidden_states": torch.ones(1, 2, 4)} if plan is JOINT else {}
        return [model(hidden_states=tokens(k), **joint) for k in range(steps)], cache.report().get("")


def pipeline_call(pipe, threshold, kind, *, layout=None, **changes):
    """A whole call with a cache on each transformer: its latents, and the reports by transformer."""
    done = [0]

    def on_step_end(pipeline, step, timestep, tensors):
        done[0] = step + 1
        return tensors

    with ExitStack() as stack:
        caches = {
            name: stack.enter_context(caching(getattr(pipe, name), threshold, layout=layout, warmup_steps=1))
            for name in ("transformer", "transformer_2")
            if getattr(pipe, name, None) is not None
        }
        for cache in caches.values():
            cache.begin_call(is_last=lambda _: done[0] + 1 >= pipe.num_timesteps)
        arguments = tiny.call(kind, callback_on_step_end=on_step_end, **changes)
        frames = pipe(**arguments, generator=seeded(7)).frames
        return frames, {name: cache.report() for name, cache in caches.items()}
