"""What ranks on simulated devices run: the bodies of the CPU tests, with their tensors on this rank's device.

Imported by the server before it forks, so that every rank has it.
"""

import functools
import inspect
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

import usp.demo
import usp.verify
from runtime.device import Device
from tests import tiny
from tests.usp import families, test_attention, test_comm, test_lora
from tests.usp.in_ranks import SEED, Case, error_of, offload, seeded
from usp.config import CacheConfig
from usp.job import prepare
from usp.options import JobOptions
from usp.pipeline import ParallelPipeline
from usp.recipes import TASKS
from usp.schedulers import FAMILIES, solved_there, with_scheduler

WORLD: list[Any] = []  # this rank's World, once it has joined
DEMO = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 2.5}


def kind() -> str:
    """The kind of device that these ranks run on."""
    return torch._C._get_privateuse1_backend_name()


def device() -> torch.device:
    """This rank's device."""
    return torch.device(kind(), torch.get_device_module(kind()).current_device())


def place() -> tuple[str, int, str]:
    """What this rank sees: its device, how many there are, the backend."""
    return str(device()), torch.get_device_module(kind()).device_count(), dist.get_backend()


def on_devices() -> None:
    """Have the CPU tests' bodies make their tensors on the device; for the server alone.

    Attention is compared with the CPU's: inputs move to the device, the result comes back.
    """
    attend, numbers = test_attention.attend, test_comm.numbers

    def attend_there(layout: str, *tensors: Any, **options: Any) -> torch.Tensor:
        there = [t.to(device()) if isinstance(t, torch.Tensor) else t for t in tensors]
        return attend(layout, *there, **options).cpu()

    test_attention.attend = attend_there
    test_attention.LENGTHS, test_attention.HEADS = (1, 2, 3, 13, 64), (1, 3, 6)  # the odd ones, for time
    test_comm.numbers = lambda *args, **kwargs: numbers(*args, **kwargs).to(device())


def run_body(module: str, name: str, *args: Any) -> Any:
    """A body of tests.usp.<module>, by name: what it was bound to before `on_devices` does not count."""
    modules = {"attention": test_attention, "comm": test_comm, "lora": test_lora}
    return getattr(modules[module], name)(*args)


def host(frames: Any) -> np.ndarray:
    """A pipeline's frames or latents, as an array."""
    return frames.cpu().numpy() if isinstance(frames, torch.Tensor) else np.asarray(frames)


def pipelines(layout: str, cases: list[Case], **options: Any) -> list[np.ndarray]:
    """The tiny pipelines on this rank's device, all ranks together."""
    results = []
    for name, changes in cases:
        with ParallelPipeline(tiny.build(name), layout, **options) as pipe:
            assert pipe.world.device.kind == kind()
            seed = None if "generator" in changes else SEED
            results.append(host(pipe(**tiny.call(name, **changes), seed=seed).frames))
    return results


def demo_pipeline(dtype: torch.dtype = torch.float32) -> Any:
    """The bundled pipeline in one dtype."""
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(usp.demo.MODEL_DIR).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@functools.cache
def film_alone(dtype: torch.dtype = torch.float32) -> np.ndarray:
    """One CPU process's film of the bundled model."""
    call = {"output_type": "np", "generator": seeded(SEED), **DEMO}
    return demo_pipeline(dtype)(usp.demo.DEFAULTS.prompt, **call).frames


def demo(
    layout: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[np.ndarray, dict[str, int], dict[str, int]]:
    """The bundled pipeline's film, which operators ran for it, and which of them with wide numbers."""
    from tests import simulated

    simulated.reset_counts()
    with ParallelPipeline(demo_pipeline(dtype), layout, **options) as pipe:
        film = host(pipe(usp.demo.DEFAULTS.prompt, output_type="np", seed=SEED, **DEMO).frames)
    return film, dict(simulated.CALLS), dict(simulated.WIDE)


def family(name: str, cell: families.Cell) -> dict[str, Any]:
    """A family's own pipeline, as on the CPU: its latents, the error, and which operators ran, which wide."""
    from tests import simulated

    simulated.reset_counts()
    latents, error, _ = families.together(name, cell)
    calls, wide = dict(simulated.CALLS), dict(simulated.WIDE)
    return {"latents": latents, "error": error, "calls": calls, "wide": wide}


def verified(task: str, folder: str, layout: str) -> int:
    """The exit code of `usp.verify` on a folder's model, at two steps."""
    options = JobOptions(
        model=folder, prompt="a circle", size="112x80", steps=2, seed=SEED, dtype="fp32", parallel=layout
    )
    return usp.verify.verify(prepare(TASKS[task], options), WORLD[0], everything=False, limit=1e-4)


def scheduler_errors() -> dict[str, tuple[float, dict[str, int]]]:
    """Each scheduler's sample after five steps against the host's, and what ran there with wide numbers."""
    from tests import simulated

    found = {}
    for kind_of_model, names in FAMILIES.items():
        for name in names:
            simulated.reset_counts()
            here = scheduled(kind_of_model, name, device())
            wide = dict(simulated.WIDE)
            there = scheduled(kind_of_model, name, torch.device("cpu"))
            found[f"{kind_of_model} {name}"] = (here - there).abs().max().item(), wide
    return found


def scheduled(kind_of_model: str, name: str, where: torch.device) -> torch.Tensor:
    """The sample after five steps of a scheduler, of a model that is a sine."""
    is_flow = kind_of_model == "flow"
    base = FlowMatchEulerDiscreteScheduler(shift=3.0) if is_flow else DDIMScheduler()
    pipeline = SimpleNamespace(scheduler=with_scheduler(base, name))
    scheduler, generator = pipeline.scheduler, torch.Generator().manual_seed(0)
    sample = torch.randn(1, 4, 8, 8, generator=generator).to(where)
    with solved_there(pipeline, Device(where.type, where.index)):
        scheduler.set_timesteps(5, device=where)
        takes = inspect.signature(scheduler.step).parameters
        draws = {"generator": generator} if "generator" in takes else {}
        for timestep in scheduler.timesteps:
            seen = sample if is_flow else scheduler.scale_model_input(sample, timestep)
            sample = scheduler.step((3 * seen).sin(), timestep, sample, return_dict=False, **draws)[0]
    return sample.cpu()


def cached_pipeline(layout: str, case: Case, threshold: float) -> tuple[np.ndarray, list[list[bool]]]:
    """A tiny pipeline with a first-block cache: its result, and which forwards each branch skipped."""
    name, changes = case
    config = CacheConfig(threshold=threshold, warmup_steps=1)
    with ParallelPipeline(tiny.build(name), layout, cache=config) as pipe:
        result = host(pipe(**tiny.call(name, **changes), seed=SEED).frames)
        assert pipe.report is not None
        return result, [branch["skipped"] for branch in pipe.report.cache.values()]


def offloaded(layout: str, case: Case, way: str) -> tuple[list[np.ndarray], set[str]]:
    """A tiny pipeline that is offloaded, called twice: its results, and where its weights lie afterwards."""
    name, changes = case
    pipeline = tiny.build(name)
    offload(pipeline, way, device())
    with ParallelPipeline(pipeline, layout) as pipe:
        results = [host(pipe(**tiny.call(name, **changes), seed=SEED).frames) for _ in range(2)]
    models = [c for c in pipeline.components.values() if isinstance(c, torch.nn.Module)]
    return results, {parameter.device.type for model in models for parameter in model.parameters()}


def device_facts() -> dict[str, Any]:
    """What the device answers: memory, generators, a file of weights."""
    here = WORLD[0].device
    module = torch.get_device_module(kind())
    here.reset_memory_peak()
    before = here.memory_peak()
    held = torch.zeros(1 << 20, device=device())
    peak = here.memory_peak() - before
    draws = []
    for seed in (1, 1, 2):
        module.manual_seed(seed)
        draws.append(torch.randn(4, device=device()).cpu())
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        safetensors.torch.save_file({"weights": held[:8].cpu() + 3}, file.name)
        loaded = safetensors.torch.load_file(file.name, device=str(device()))["weights"]
    return {
        "total": here.memory_total(),
        "peak": peak,
        "too much": error_of(lambda: torch.empty(1 << 28, device=device())).split(":")[0],
        "same numbers": torch.equal(draws[0], draws[1]),
        "other numbers": not torch.equal(draws[0], draws[2]),
        "loaded": loaded.device == device() and loaded.cpu().tolist() == [3.0] * 8,
    }
