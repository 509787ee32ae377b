"""One run of a task, checked as far as it can be before weights are read and ranks meet."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runtime.device import Device, detect_device
from runtime.log import get_logger
from runtime.process_group import RankEnv, World, read_rank_env
from usp.attention.interop import check_engine, check_shares
from usp.attention.kernels import check_kernel
from usp.config import CacheConfig, ParallelConfig
from usp.demo import MODEL_DIR, unknown_words
from usp.layout import Split
from usp.model_folder import ModelFacts, read_model_folder
from usp.planner import Choice, choose_for, parse_link, workload_of_folder
from usp.tasks import Request, Task, choose_dtype, load_pipeline, model_path

LOAD_LIMIT_S = 3600.0

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that was checked before the ranks met."""

    task: Task
    request: Request
    env: RankEnv
    device: Device
    facts: ModelFacts | None  # None: a hub name, not looked at yet
    model: str | None
    dtype: Any
    asked: ParallelConfig | None  # None: auto
    transport: str
    link: str | None  # given instead of measured
    kernel: str
    cache: CacheConfig | None

    @property
    def tokens(self) -> int:
        """Tokens of the whole sequence; 0 for a hub name that was not looked at."""
        r = self.request
        return self.facts.tokens(width=r.width, height=r.height, num_frames=r.num_frames) if self.facts else 0

    def choose(self, world: World, facts: ModelFacts) -> Choice:
        """What the planner finds for this request; measures the machine. Collective."""
        r = self.request
        workload = workload_of_folder(
            facts,
            width=r.width,
            height=r.height,
            num_frames=r.num_frames,
            guidance_scale=r.guidance_scale,
            itemsize=self.dtype.itemsize,
        )
        link = None if self.link is None else parse_link(self.link)
        return choose_for(world, workload, self.dtype, transport=self.transport, link=link)


def prepare(
    task: Task,
    request: Request,
    *,
    model: str | None,
    dtype: str,
    device: str | None,
    words: Any,
    transport: str,
    link: str | None,
    kernel: str,
    cache: float | None,
) -> Job:
    """The job, after every check that needs neither weights nor another rank; alike on all ranks.

    Raises ValueError with one sentence.
    """
    env = read_rank_env()
    asked = words(env.world_size)
    folder = model_path(model)
    facts = read_model_folder(folder, pipeline=task.pipeline) if folder else None
    last = detect_device(device, local_rank=env.local_world_size - 1, world_size=env.world_size)
    here = last if last.index is None else detect_device(
        device, local_rank=env.local_rank, world_size=env.world_size
    )  # fmt: skip
    check_kernel(kernel, here.kind)
    if link is not None:
        parse_link(link)
    if asked is not None and asked.engine != "usp":
        check_engine(asked.engine, ring_degree=asked.ring_degree, kernel=kernel, device_type=here.kind)
    job = Job(
        task=task,
        request=request,
        env=env,
        device=here,
        facts=facts,
        model=model,
        dtype=choose_dtype(dtype, here),
        asked=asked,
        transport=transport,
        link=link,
        kernel=kernel,
        cache=None if cache is None else CacheConfig(threshold=cache),
    )
    if facts is not None:
        check_request(job, facts)
    return job


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

    fetch = partial(DiffusionPipeline.download, job.model)
    try:
        world.wait_for_main("download", fetch, LOAD_LIMIT_S)
        folder = Path(fetch())
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(
            f"model {job.model!r} is not a folder here, and it cannot be had as a hub name ({reason}); "
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
    world.meet("loading the model", LOAD_LIMIT_S)  # a slow disk may take longer than a collective may
    return pipeline, config
