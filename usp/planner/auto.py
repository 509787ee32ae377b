"""parallel="auto": measure once, choose for every call, and say what was chosen and why."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from runtime.log import get_logger
from runtime.process_group import World
from usp.config import ParallelConfig
from usp.planner.choose import Choice, choose, only
from usp.planner.cost import Workload
from usp.planner.machine import Link, Machine
from usp.planner.measure import measure_machine
from usp.planner.models import pipeline_bytes, workload_of_pipeline
from usp.plans import plan_for

logger = get_logger(__name__)


def choose_for(
    world: World,
    workload: Workload | None,
    dtype: torch.dtype,
    *,
    transport: str = "auto",
    strict: bool = False,
    link: Link | None = None,
) -> Choice:
    """What the ranks of `world` shall do, the same on all of them; `workload` is None for a model whose
    sequence cannot be spread.

    The machine is measured; a given `link` is taken instead of a measured one. One rank measures nothing.
    Collective. Logs the reason; `config` of the result raises ValueError if no layout fits.
    """
    if world.world_size == 1 or workload is None:
        config = replace(_without_measuring(world), transport=transport)
        alone = "nothing to choose; start more ranks with torchrun"
        return only(config, alone if world.world_size == 1 else "this model has no sequence to spread")
    machine = measure_machine(world, workload, dtype, link=link)
    choice = choose(workload, machine, world.world_size, transport=transport, strict=strict)
    logger.info("auto: %s", choice.reason)
    return choice


def _without_measuring(world: World) -> ParallelConfig:
    """The only layout of one rank, or of a model whose sequence cannot be spread."""
    return ParallelConfig(cfg_degree=world.world_size)


class Auto:
    """The layouts of one pipeline's calls; the machine is measured, and the pipeline's weights are counted,
    when it is made.

    Every rank holds the same figures, so every rank chooses the same layout from the same arguments.
    Collective to make, not to ask.
    """

    def __init__(
        self, world: World, pipeline: Any, model: nn.Module, *, strict: bool = False, cached: bool = False
    ) -> None:
        self._world, self._pipeline, self._model, self._strict = world, pipeline, model, strict
        self._known = {"parameter_bytes": pipeline_bytes(pipeline), "cached": cached}
        self._machine: Machine | None = None
        self._told: ParallelConfig | None = None
        if world.world_size > 1 and plan_for(model).attentions:
            dtype = next(model.parameters()).dtype
            self._machine = measure_machine(world, self._workload({}), dtype)

    def config(self, arguments: Mapping[str, Any]) -> ParallelConfig:
        """The layout for a call with these arguments and the pipeline's defaults for the rest.

        Logs the reason when it is another than for the call before. Raises ValueError, with the numbers, if
        none fits the memory.
        """
        if self._machine is None:
            return _without_measuring(self._world)
        choice = self._choice(self._machine, arguments)
        if choice.config != self._told:
            self._told = choice.config
            logger.info("auto: %s", choice.reason)
        return choice.config

    def first(self) -> ParallelConfig:
        """The layout for a call of the pipeline's defaults, or the smallest: a call may be smaller."""
        if self._machine is None:
            return _without_measuring(self._world)
        choice = self._choice(self._machine, {})
        return choice.chosen or choice.candidates[0].config

    def _choice(self, machine: Machine, arguments: Mapping[str, Any]) -> Choice:
        return choose(self._workload(arguments), machine, self._world.world_size, strict=self._strict)

    def _workload(self, arguments: Mapping[str, Any]) -> Workload:
        return workload_of_pipeline(self._pipeline, self._model, arguments, **self._known)
