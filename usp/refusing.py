"""Arguments that a plan cannot serve, found before anything is computed."""

import inspect

from usp.plan import ShardPlan


def refuse(plan: ShardPlan, bound: inspect.BoundArguments) -> None:
    """Raise ValueError if a forward was given an argument that the plan cannot serve."""
    for entry in plan.refused:
        default = bound.signature.parameters[entry.argument].default
        value = bound.arguments.get(entry.argument, default)
        if value is not default and value != default:
            raise ValueError(
                f"{entry.argument} was given to {plan.model}: {entry.why}; leave it out, or use one rank"
            )
