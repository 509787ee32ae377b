"""The tasks of the command line, as data: which pipelines a name runs, and what is asked by default.

Sizes, steps and guidance are those of the models' own cards and of diffusers' pipelines.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Task:
    """Pipeline classes and their defaults; sizes in pixels and frames.

    `images` is the least and the most number of input images (None: any). `shaped_by_image` means that a size
    that is not given has the last image's shape, and the area of `width` x `height`. `image_pipeline` is the
    class to load the same folder with if there are images. `guidance_argument` names the call's argument that
    `guidance_scale` is for. Only a `bundled` task may be run without a model.
    """

    name: str
    summary: str
    pipeline: str | tuple[str, ...]
    width: int
    height: int
    num_frames: int = 1
    num_inference_steps: int
    guidance_scale: float
    guidance_argument: str = "guidance_scale"
    negative_prompt: str | None = None
    fps: int = 1
    kind: Literal["video", "image"] = "image"
    images: tuple[int, int | None] = (0, 0)
    shaped_by_image: bool = False
    image_pipeline: str | None = None
    bundled: bool = False

    @property
    def pipelines(self) -> tuple[str, ...]:
        """The pipeline classes that the task runs, the usual one first."""
        return (self.pipeline,) if isinstance(self.pipeline, str) else self.pipeline

    @property
    def suffix(self) -> str:
        """The ending of what the task writes."""
        return ".mp4" if self.kind == "video" else ".png"


WAN_T2V = Task(
    name="wan-t2v",
    summary="Text to video with a Wan 2.1 or 2.2 pipeline.",
    pipeline="WanPipeline",
    width=832,
    height=480,
    num_frames=81,
    num_inference_steps=50,
    guidance_scale=5.0,
    fps=16,
    kind="video",
    bundled=True,
)
WAN_I2V = Task(
    name="wan-i2v",
    summary="A video that begins with an image, with a Wan 2.1 or 2.2 pipeline.",
    pipeline="WanImageToVideoPipeline",
    width=832,
    height=480,
    num_frames=81,
    num_inference_steps=50,
    guidance_scale=5.0,
    fps=16,
    kind="video",
    images=(1, 1),
    shaped_by_image=True,
)
WAN_TI2V = Task(
    name="wan-ti2v",
    summary="Text, or text and a first image, to video with Wan 2.2 5B.",
    pipeline="WanPipeline",
    width=1280,
    height=704,
    num_frames=121,
    num_inference_steps=50,
    guidance_scale=5.0,
    fps=24,
    kind="video",
    images=(0, 1),
    shaped_by_image=True,
    image_pipeline="WanImageToVideoPipeline",
)
QWEN_IMAGE = Task(
    name="qwen-image",
    summary="Text to image with Qwen-Image.",
    pipeline="QwenImagePipeline",
    width=1328,
    height=1328,
    num_inference_steps=50,
    guidance_scale=4.0,
    guidance_argument="true_cfg_scale",
    negative_prompt=" ",  # without one its pipelines leave guidance off
)
QWEN_IMAGE_EDIT = Task(
    name="qwen-image-edit",
    summary="Change images, or make one from several, with Qwen-Image-Edit or Edit-Plus.",
    pipeline=("QwenImageEditPlusPipeline", "QwenImageEditPipeline"),
    width=1024,
    height=1024,
    num_inference_steps=40,
    guidance_scale=4.0,
    guidance_argument="true_cfg_scale",
    negative_prompt=" ",
    images=(1, None),
    shaped_by_image=True,
)
FLUX = Task(
    name="flux",
    summary="Text to image with FLUX.1; text, with or without images, to image with FLUX.2.",
    pipeline=("FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline"),
    width=1024,
    height=1024,
    num_inference_steps=28,
    guidance_scale=3.5,
    images=(0, None),
)
SD3 = Task(
    name="sd3",
    summary="Text to image with Stable Diffusion 3 or 3.5.",
    pipeline="StableDiffusion3Pipeline",
    width=1024,
    height=1024,
    num_inference_steps=28,
    guidance_scale=3.5,
)
Z_IMAGE = Task(
    name="z-image",
    summary="Text to image with Z-Image; for Turbo give --steps 9 --guidance 0.",
    pipeline="ZImagePipeline",
    width=1024,
    height=1024,
    num_inference_steps=50,
    guidance_scale=5.0,
)
SD15 = Task(
    name="sd15",
    summary="Text to image with Stable Diffusion 1.5.",
    pipeline="StableDiffusionPipeline",
    width=512,
    height=512,
    num_inference_steps=50,
    guidance_scale=7.5,
)
TASKS: dict[str, Task] = {
    task.name: task
    for task in (WAN_T2V, WAN_I2V, WAN_TI2V, QWEN_IMAGE, QWEN_IMAGE_EDIT, FLUX, SD3, Z_IMAGE, SD15)
}
