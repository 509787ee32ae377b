"""One run of a task, checked as far as it can be before weights are read and ranks meet."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runtime.device import Device, detect_device
from runtime.fused import check_fused
from runtime.hub import HubError, check_hub
from runtime.log import get_logger
from runtime.process_group import RankEnv, World, read_hub, read_rank_env
from usp.attention.interop import check_engine, check_shares
from usp.attention.kernels import check_kernel
from usp.config import CacheConfig, ParallelConfig, choose_parallel
from usp.demo import MODEL_DIR, unknown_words
from usp.images import read_images
from usp.layout import Split
from usp.lora import LoraFile, check_file, check_fits, load_loras, parse_lora
from usp.model_folder import ModelFacts, read_model_folder
from usp.options import JobOptions
from usp.pipeline import ParallelPipeline
from usp.planner import (
    Choice,
    Workload,
    branches_of,
    choose_for,
    parse_link,
    plan_of_folder,
    workload_of_folder,
)
from usp.randomness import check_seed
from usp.schedulers import check_scheduler, with_scheduler
from usp.tasks import (
    Request,
    Task,
    call_with_defaults,
    check_call,
    check_words,
    choose_dtype,
    fit,
    imported_class,
    model_path,
    parse_weights,
    pipeline_class,
    settle,
)

LOAD_LIMIT_S = 3600.0

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that was checked before the ranks met; `facts` is None for a hub name, until `find`.

    A job that `loads` nothing, but looks at layouts, needs the model's configs alone.
    """

    task: Task
    options: JobOptions
    request: Request
    env: RankEnv
    device: Device
    facts: ModelFacts | None
    dtype: torch.dtype
    asked: ParallelConfig | None  # None: auto
    cache: CacheConfig | None
    loras: tuple[LoraFile, ...]
    weights: dict[str, Path]
    hub: str
    loads: bool = True

    @property
    def model(self) -> ModelFacts:
        """The model's facts, which must be known by now."""
        assert self.facts is not None, "find() comes first"
        return self.facts

    @property
    def tokens(self) -> int:
        """Tokens of the picture's whole sequence."""
        return self.model.tokens(**self.request.shape)

    @property
    def branches(self) -> int:
        """Guidance branches of each step."""
        call = call_with_defaults(self.request, self.model)
        return branches_of(call, self.model.config, plan_of_folder(self.model))

    @property
    def workload(self) -> Workload | None:
        """The request as the planner takes it; None for a model whose sequence cannot be spread."""
        call, cached = call_with_defaults(self.request, self.model), self.cache is not None
        return workload_of_folder(self.model, call, itemsize=self.dtype.itemsize, cached=cached)

    def choose(self, world: World) -> Choice:
        """What the planner finds for this request; measures the machine. Collective."""
        options = self.options
        link = None if options.link is None else parse_link(options.link)
        found = {"transport": options.transport, "strict": options.strict, "link": link}
        return choose_for(world, self.workload, self.dtype, **found)

    def parallel(self, plain: Any, config: ParallelConfig, world: World) -> ParallelPipeline:
        """The pipeline on all ranks, as the options want it. Collective."""
        options = self.options
        return ParallelPipeline(
            plain,
            config,
            kernel=options.kernel,
            cache=self.cache,
            fused=options.fused,
            strict=options.strict,
            world=world,
        )


def prepare(task: Task, options: JobOptions, *, fps: int | None = None, loads: bool = True) -> Job:
    """The job, after every check that needs neither weights nor another rank; alike on all ranks.

    Looks at the words first, which need no file, then at the model, then at the rest. Raises ValueError with
    one sentence.
    """
    check_seed(options.seed)
    if not 0 < options.timeout < math.inf:
        raise ValueError(f"timeout {options.timeout:g} was given; use a number of seconds above 0")
    hub = options.hub or read_hub()
    check_hub(hub)
    env = read_rank_env()
    asked = choose_parallel(options.parallel, options.attention, options.transport, env.world_size)
    here = _own_device(options.device, env)
    check_kernel(options.kernel, here.kind)
    check_fused(options.fused, here.kind)
    if options.link is not None:
        parse_link(options.link)
    if asked is not None and asked.engine != "usp":
        ring, kernel = asked.ring_degree, options.kernel
        check_engine(asked.engine, ring_degree=ring, kernel=kernel, device_type=here.kind)
    dtype = choose_dtype(options.dtype, here)
    cache = None if options.cache is None else CacheConfig(threshold=options.cache)
    loras = tuple(parse_lora(text) for text in options.lora or ())
    weights = parse_weights(options.weights or ())
    words = _words(options, fps)
    check_words(task, images=len(options.image or ()), **words)
    folder = model_path(options.model)
    facts = None if folder is None else read_model_folder(folder, pipeline=task.pipeline, weights=loads)
    for file in loras:
        check_file(file.path)
    job = Job(
        task=task,
        options=options,
        request=settle(task, images=read_images(options.image or ()), **words),
        env=env,
        device=here,
        facts=None,
        dtype=dtype,
        asked=asked,
        cache=cache,
        loras=loras,
        weights=weights,
        hub=hub,
        loads=loads,
    )
    if facts is not None:
        return with_model(job, facts)
    check_scheduler(options.scheduler, task.pipelines[0])
    return job


def _words(options: JobOptions, fps: int | None) -> dict[str, Any]:
    """What the options say of the picture, as `settle` takes it; images apart."""
    given = {"prompt": options.prompt, "negative_prompt": options.negative_prompt, "fps": fps}
    given |= {"num_frames": options.frames, "num_inference_steps": options.steps}
    given |= {"guidance_scale": options.guidance}
    return {"bundled": options.model is None, "size": options.size, "count": options.count, **given}


def _own_device(choice: str | None, env: RankEnv) -> Device:
    """This rank's device; the last local rank's is found first, so that all ranks refuse a lack alike."""
    last = detect_device(choice, local_rank=env.local_world_size - 1, world_size=env.world_size)
    if last.index is None:
        return last
    return detect_device(choice, local_rank=env.local_rank, world_size=env.world_size)


def with_model(job: Job, facts: ModelFacts) -> Job:
    """The job on a model that is known now. Raises ValueError unless it can do what is asked with it."""
    job = replace(job, facts=facts, request=fit(job.request, facts))
    facts.check_size(**job.request.shape)
    check_call(job.request, facts)
    check_scheduler(job.options.scheduler, pipeline_class(job.request, facts))
    if job.weights or job.loras:
        _check_files(job)
    config = job.asked
    if config is not None and config.engine != "usp":
        split = Split((job.tokens,), config.sp_degree, config.ulysses_degree)
        check_shares(config.engine, split, heads=facts.heads, ulysses_degree=config.ulysses_degree)
    if job.env.rank == 0:
        _warn_of_no_effect(job)
    return job


def _check_files(job: Job) -> None:
    """Raise ValueError unless `--weights` and `--lora` have the keys of the folder's models; reads configs
    and headers, and the LoRA files."""
    from usp.loading import check_weights, empty_models  # which bring transformers

    check_weights(job.model.folder, job.weights)
    if job.loras:
        pipeline = imported_class(pipeline_class(job.request, job.model))
        names = getattr(pipeline, "_lora_loadable_modules", ())
        check_fits(pipeline, empty_models(job.model.folder, names), job.loras)


def _warn_of_no_effect(job: Job) -> None:
    """One warning line for each option that changes nothing in this run, and for words never seen."""
    options, request = job.options, job.request
    if job.env.world_size == 1:
        for name in ("attention", "kernel", "transport", "link"):
            value = getattr(options, name)
            if value not in (None, "auto"):
                logger.warning("%s=%r has no effect: one rank holds the whole sequence", name, value)
    elif job.asked is not None and options.link is not None:
        logger.warning("link=%r has no effect: the layout is given, %s", options.link, job.asked)
    if options.negative_prompt and job.branches == 1:
        off = request.guidance_scale <= 1
        why = f"guidance is off at {request.guidance_scale:g}" if off else "the model runs one branch only"
        logger.warning("the negative prompt has no effect: %s", why)
    if job.model.folder == MODEL_DIR and (unknown := unknown_words(request.prompt)):
        logger.warning(
            "the demo model has never seen %s; see usp/demo/README.md for its words", ", ".join(unknown)
        )


def find(job: Job, world: World) -> Job:
    """The job with its model's facts. A hub name is fetched once per host first: all that is to be loaded,
    or the configs. Collective."""
    if job.facts is not None:
        return job
    from usp.loading import hub_folder

    assert job.options.model is not None, "the bundled model is a folder"
    try:
        folder = hub_folder(job.options.model, world, hub=job.hub, weights=job.loads)
    except HubError as error:
        raise SystemExit(str(error)) from error
    return with_model(job, read_model_folder(folder, pipeline=job.task.pipeline, weights=job.loads))


def load(job: Job, world: World) -> tuple[Any, ParallelConfig]:
    """The pipeline on this rank's device, not yet parallel, and its layout, settled before weights are read.

    `job` has its model. Collective.
    """
    from usp.loading import load_pipeline, quiet

    config = job.asked or job.choose(world).config
    if not world.is_main:
        quiet()
    dtypes = {"default": job.dtype} | ({"vae": torch.float32} if job.model.vae_in_fp32 else {})
    name = pipeline_class(job.request, job.model)
    plain, reports = load_pipeline(
        job.model.folder, pipeline=name, device=world.device, dtypes=dtypes, files=job.weights
    )
    for part in job.weights:
        logger.info("%s: %s", part, reports[part])
    if job.options.scheduler is not None:
        plain.scheduler = with_scheduler(plain.scheduler, job.options.scheduler)
    load_loras(plain, job.loras, world)
    world.meet("loading the model", LOAD_LIMIT_S)  # a slow disk may take longer than a collective may
    return plain, config
