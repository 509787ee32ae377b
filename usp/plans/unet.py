"""Stable Diffusion 1.5, 2 and XL: a UNet, whose batch is cut over cfg ranks and whose sequence is not."""

from usp.plan import Output, ShardPlan

UNET = ShardPlan(
    model="UNet2DConditionModel",
    output=Output(
        argument="sample",
        batched=("sample", "timestep", "encoder_hidden_states", "class_labels", "timestep_cond"),
        batched_inside=(
            *("added_cond_kwargs", "down_block_additional_residuals", "mid_block_additional_residual"),
            "down_intrablock_additional_residuals",
        ),
    ),
    stacked=True,
    head_config="attention_head_dim",  # holds the count of heads
    head_dim_config="",
)
