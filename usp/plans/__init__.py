"""The shard plans of the model families that we support, by model class name."""

from typing import Any

from usp.plan import ShardPlan
from usp.plans.cogvideox import COGVIDEOX
from usp.plans.flux import FLUX, FLUX2
from usp.plans.hunyuan_video import HUNYUAN_VIDEO
from usp.plans.ltx import LTX
from usp.plans.qwen_image import QWEN_IMAGE
from usp.plans.sd3 import SD3
from usp.plans.unet import UNET
from usp.plans.wan import VACE, WAN
from usp.plans.z_image import Z_IMAGE

PLANS: dict[str, ShardPlan] = {
    plan.model: plan
    for plan in (
        *(WAN, VACE, FLUX, FLUX2, QWEN_IMAGE, SD3, Z_IMAGE, HUNYUAN_VIDEO, COGVIDEOX, LTX),
        UNET,
    )
}
# Models that the plan type cannot express yet, and why.
UNSERVED: dict[str, str] = {
    "WanAnimateTransformer3DModel": (
        "its face adapter attends frame by frame, and a rank's share of the tokens may end inside a frame"
    ),
    "LTX2VideoTransformer3DModel": (
        "its audio attends to the tokens of the film across ranks, and it returns two results"
    ),
}


def plan_for(model: object) -> ShardPlan:
    """The plan of a model by its class. Raises ValueError that lists the classes with plans."""
    name = type(model).__name__
    if name not in PLANS:
        why = f" ({UNSERVED[name]})" if name in UNSERVED else ""
        raise ValueError(
            f"{name} has no shard plan{why}; there are plans for {', '.join(sorted(PLANS))}; to add one "
            "write usp/plans/<family>.py and list it in usp/plans/__init__.py"
        )
    return PLANS[name]


def heads_of(model: Any) -> int | None:
    """The attention heads of a model with a plan; None where its sequence is not spread over ranks."""
    plan = plan_for(model)
    return model.config[plan.head_config] if plan.attentions else None


def head_dim_of(model: Any) -> int:
    """The size of a head of a model whose plan spreads its sequence."""
    size = model.config[plan_for(model).head_dim_config]
    return sum(size) if isinstance(size, (tuple, list)) else size


def check_sequence(model: object, sp_degree: int) -> None:
    """Raise ValueError if `sp_degree` ranks are to share the sequence of a model that cannot be spread so."""
    plan = plan_for(model)
    if sp_degree > 1 and not plan.attentions:
        raise ValueError(
            f"{plan.model} was to share one sequence over {sp_degree} ranks; a UNet has no sequence that "
            "runs through it, so sequence parallelism does not apply; give the ranks to cfg, which cuts the "
            f"batch of guidance branches and images, for example cfg{sp_degree}"
        )
