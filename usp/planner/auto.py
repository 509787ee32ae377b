"""parallel="auto": measure, choose, and say what was chosen and why."""

import torch

from runtime.log import get_logger
from runtime.process_group import World
from usp.planner.choose import Choice, alone, choose
from usp.planner.cost import Workload
from usp.planner.machine import Link, Machine
from usp.planner.measure import measure_machine

logger = get_logger(__name__)


def choose_for(
    world: World,
    workload: Workload,
    dtype: torch.dtype,
    *,
    transport: str = "auto",
    strict: bool = False,
    link: Link | None = None,
    machine: Machine | None = None,
) -> Choice:
    """What the ranks of `world` shall do, the same on all of them.

    The machine is measured unless given; a given `link` is taken instead of a measured one. One rank measures
    nothing. Collective. Logs the reason; `config` of the result raises ValueError if no layout fits.
    """
    if world.world_size == 1:
        return alone(workload, transport=transport)
    if machine is None:
        machine = measure_machine(world, workload, dtype, link=link)
    choice = choose(workload, machine, world.world_size, transport=transport, strict=strict)
    logger.info("auto: %s", choice.reason)
    return choice
