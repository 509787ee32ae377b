"""The shard plans of the model families that we support, by model class name."""

from usp.plan import ShardPlan
from usp.plans.wan import WAN

PLANS: dict[str, ShardPlan] = {plan.model: plan for plan in (WAN,)}


def plan_for(model: object) -> ShardPlan:
    """The plan of a model by its class. Raises ValueError that lists the classes with plans."""
    name = type(model).__name__
    if name not in PLANS:
        raise ValueError(
            f"{name} has no shard plan; there are plans for {', '.join(sorted(PLANS))}; to add one write "
            "usp/plans/<family>.py and list it in usp/plans/__init__.py"
        )
    return PLANS[name]
