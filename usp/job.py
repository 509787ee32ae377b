"""One run of a task, checked as far as it can be before weights are read and ranks meet."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runtime.device import Device, detect_device
from runtime.log import get_logger
from runtime.process_group import RankEnv, World, read_rank_env
from usp.attention.interop import check_engine, check_shares
from usp.attention.kernels import check_kernel
from usp.config import CacheConfig, ParallelConfig, choose_parallel
from usp.demo import MODEL_DIR, unknown_words
from usp.layout import Split
from usp.lora import LoraFile, check_loras, load_loras
from usp.model_folder import ModelFacts, read_model_folder
from usp.options import JobOptions
from usp.pipeline import ParallelPipeline
from usp.planner import Choice, branches_of, choose_for, parse_link, workload_of_folder
from usp.randomness import check_seed
from usp.schedulers import check_scheduler, with_scheduler
from usp.tasks import Request, Task, choose_dtype, load_pipeline, model_path, settle

LOAD_LIMIT_S = 3600.0

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that was checked before the ranks met."""

    task: Task
    options: JobOptions
    request: Request
    env: RankEnv
    device: Device
    facts: ModelFacts | None  # None: a hub name, not looked at yet
    dtype: torch.dtype
    asked: ParallelConfig | None  # None: auto
    cache: CacheConfig | None
    loras: tuple[LoraFile, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the whole sequence; 0 for a hub name that was not looked at."""
        r = self.request
        return self.facts.tokens(width=r.width, height=r.height, num_frames=r.num_frames) if self.facts else 0

    def choose(self, world: World, facts: ModelFacts) -> Choice:
        """What the planner finds for this request; measures the machine. Collective."""
        r, options = self.request, self.options
        workload = workload_of_folder(
            facts,
            width=r.width,
            height=r.height,
            num_frames=r.num_frames,
            branches=branches_of(self.request.call_arguments(), {}),
            itemsize=self.dtype.itemsize,
        )
        link = None if options.link is None else parse_link(options.link)
        found = {"transport": options.transport, "strict": options.strict, "link": link}
        return choose_for(world, workload, self.dtype, **found)

    def parallel(self, plain: Any, config: ParallelConfig, world: World) -> ParallelPipeline:
        """The pipeline on all ranks, as the options want it. Collective."""
        options = self.options
        return ParallelPipeline(
            plain, config, kernel=options.kernel, cache=self.cache, strict=options.strict, world=world
        )


def prepare(task: Task, options: JobOptions, *, fps: int | None = None) -> Job:
    """The job, after every check that needs neither weights nor another rank; alike on all ranks.

    Raises ValueError with one sentence.
    """
    check_seed(options.seed)
    check_scheduler(options.scheduler, task.pipeline)
    if not 0 < options.timeout < math.inf:
        raise ValueError(f"timeout {options.timeout:g} was given; use a number of seconds above 0")
    given = {"prompt": options.prompt, "negative_prompt": options.negative_prompt, "fps": fps}
    given |= {"num_frames": options.frames, "num_inference_steps": options.steps}
    given |= {"guidance_scale": options.guidance}
    request = settle(task, bundled=options.model is None, size=options.size, **given)
    env = read_rank_env()
    asked = choose_parallel(options.parallel, options.attention, options.transport, env.world_size)
    folder = model_path(options.model)
    facts = read_model_folder(folder, pipeline=task.pipeline) if folder else None
    here = _own_device(options.device, env)
    check_kernel(options.kernel, here.kind)
    if options.link is not None:
        parse_link(options.link)
    if asked is not None and asked.engine != "usp":
        ring, kernel = asked.ring_degree, options.kernel
        check_engine(asked.engine, ring_degree=ring, kernel=kernel, device_type=here.kind)
    job = Job(
        task=task,
        options=options,
        request=request,
        env=env,
        device=here,
        facts=facts,
        dtype=choose_dtype(options.dtype, here),
        asked=asked,
        cache=None if options.cache is None else CacheConfig(threshold=options.cache),
        loras=check_loras(options.lora or ()),
    )
    if facts is not None:
        check_request(job, facts)
    _warn_of_no_effect(job)
    return job


def _own_device(choice: str | None, env: RankEnv) -> Device:
    """This rank's device; the last local rank's is found first, so that all ranks refuse a lack alike."""
    last = detect_device(choice, local_rank=env.local_world_size - 1, world_size=env.world_size)
    if last.index is None:
        return last
    return detect_device(choice, local_rank=env.local_rank, world_size=env.world_size)


def _warn_of_no_effect(job: Job) -> None:
    """One warning line on rank 0 for each option that changes nothing in this run."""
    options, request = job.options, job.request
    if job.env.rank != 0:
        return
    if job.env.world_size == 1:
        for name in ("attention", "kernel", "transport", "link"):
            value = getattr(options, name)
            if value not in (None, "auto"):
                logger.warning("%s=%r has no effect: one rank holds the whole sequence", name, value)
    elif job.asked is not None and options.link is not None:
        logger.warning("link=%r has no effect: the layout is given, %s", options.link, job.asked)
    if request.negative_prompt and request.guidance_scale <= 1:
        logger.warning("the negative prompt has no effect: guidance is off at %g", request.guidance_scale)


def check_request(job: Job, facts: ModelFacts) -> None:
    """Raise ValueError unless this model can make this video with these degrees; warn of unknown words."""
    request = job.request
    facts.check_size(width=request.width, height=request.height, num_frames=request.num_frames)
    config = job.asked
    if config is not None and config.engine != "usp":
        size = {"width": request.width, "height": request.height, "num_frames": request.num_frames}
        split = Split((facts.tokens(**size),), config.sp_degree, config.ulysses_degree)
        check_shares(config.engine, split, heads=facts.heads, ulysses_degree=config.ulysses_degree)
    if job.env.rank == 0 and facts.folder == MODEL_DIR and (unknown := unknown_words(request.prompt)):
        logger.warning(
            "the demo model has never seen %s; see usp/demo/README.md for its words", ", ".join(unknown)
        )


def find(job: Job, world: World) -> ModelFacts:
    """The model's facts. A hub name is fetched by rank 0 first. Collective."""
    if job.facts is not None:
        return job.facts
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    fetch = partial(DiffusionPipeline.download, job.options.model)
    try:
        world.wait_for_main("download", fetch, LOAD_LIMIT_S)
        folder = Path(fetch())
    except OSError as error:
        name, reason = job.options.model, str(error).splitlines()[0]
        raise SystemExit(
            f"model {name!r} is not a folder here, and it cannot be had as a hub name ({reason}); "
            "give a diffusers folder, or check the name and the connection"
        ) from error
    facts = read_model_folder(folder, pipeline=job.task.pipeline)
    check_request(job, facts)
    return facts


def load(job: Job, world: World) -> tuple[Any, ParallelConfig]:
    """The pipeline on this rank, not yet parallel, and its layout, settled before any weight is read."""
    facts = find(job, world)
    config = job.asked or job.choose(world, facts).config
    pipeline = load_pipeline(facts, job.dtype, quiet=not world.is_main)
    if job.options.scheduler is not None:
        pipeline.scheduler = with_scheduler(pipeline.scheduler, job.options.scheduler)
    load_loras(pipeline, job.loras, world)
    world.meet("loading the model", LOAD_LIMIT_S)  # a slow disk may take longer than a collective may
    return pipeline, config
