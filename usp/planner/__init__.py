"""The planner: which degrees to use, from the world size, the model, its size, memory and the measured link.

`machine` and `cost` are the model, `measure` finds the machine's figures, `choose` ranks all layouts, `auto`
joins them; `python -m usp.planner` projects and fits.
"""

from usp.planner.auto import Auto, choose_for
from usp.planner.choose import Candidate, Choice, choice_json, choose, layouts_table, plan
from usp.planner.cost import Prediction, Workload, predict
from usp.planner.machine import LINKS, Channel, Link, Machine, parse_link
from usp.planner.measure import measure_machine
from usp.planner.models import (
    branches_of,
    plan_of_folder,
    workload_of_config,
    workload_of_folder,
    workload_of_pipeline,
)

__all__ = [
    "LINKS",
    "Auto",
    "Candidate",
    "Channel",
    "Choice",
    "Link",
    "Machine",
    "Prediction",
    "Workload",
    "branches_of",
    "choice_json",
    "choose",
    "choose_for",
    "layouts_table",
    "measure_machine",
    "parse_link",
    "plan",
    "plan_of_folder",
    "predict",
    "workload_of_config",
    "workload_of_folder",
    "workload_of_pipeline",
]
