"""ParallelPipeline: a user's diffusers pipeline, run by several ranks, with the same call and the same
result."""

import functools
import inspect
from contextlib import nullcontext
from typing import Any

from torch import nn

from runtime.fused import check_fused
from runtime.log import get_logger
from runtime.process_group import World, communicator_bytes
from runtime.report import format_report, start_rows
from usp.agreement import describe_call, describe_scheduler, fingerprint, weight_state
from usp.assembly import Assembly, assemble
from usp.attention.kernels import check_kernel
from usp.calls import bind_call, one_progress_bar, with_values
from usp.config import CacheConfig, ParallelConfig, resolve_parallel
from usp.deferred import concrete
from usp.joining import default_group, join, move_pipeline, ranks_running
from usp.lora import load_lora, strengths_kept
from usp.mesh import make_groups
from usp.planner import Auto
from usp.plans import PLANS, check_sequence, plan_for
from usp.randomness import agree_generator, same_default_rng
from usp.report import CallReport, Stopwatch, collect_report
from usp.schedulers import check_pipeline, scheduler_kept, solved_there, with_flow_settings

logger = get_logger(__name__)


class ParallelPipeline:
    """A diffusers pipeline whose transformers are spread over all ranks, until `close()`.

    The call takes what the pipeline takes, and `seed`; the result is the same on every rank, and equal to one
    process's. Any other attribute (`scheduler`, `vae`, `load_lora_weights`, ...) is the pipeline's own, to
    read and to set. The pipeline is moved to this rank's device unless it is offloaded.

    `parallel` is "auto", a spelling such as "ulysses2 ring2", or a ParallelConfig; `kernel` names the local
    attention kernel. `cache` is a threshold or a CacheConfig (`usp.cache`), off by default. `fused` is
    "auto", "on" or "off": norms, rope and gates by the device's fused operators (`usp.fusing`). With `strict`
    a cfg axis that a call leaves idle is an error instead of a warning. A process group that exists is used
    and left alone, else one is made and ended by `close()`. All ranks must make it, and call it, alike: same
    weights, same arguments; both are checked. Raises ValueError, on all ranks, for a model without a plan,
    degrees that do not fit, or ranks that differ.
    """

    def __init__(
        self,
        pipeline: Any,
        parallel: ParallelConfig | str = "auto",
        *,
        kernel: str = "auto",
        device: str | None = None,
        world: World | None = None,
        timeout_s: float | None = None,
        strict: bool = False,
        cache: CacheConfig | float | None = None,
        fused: str = "auto",
    ) -> None:
        if world is not None and (device is not None or world.group not in (None, default_group())):
            raise ValueError(
                "a world was given with a device, or over a group that is not the default one; a world "
                "brings its device, and pipelines use the default group; leave the device out, or the world"
            )
        self.pipeline = pipeline
        self.step = 0  # steps done in the call at hand, or in the last one
        self.place = "step 1"  # where that call is: a step, or "decoding"
        self.report: CallReport | None = None
        self._models = _planned_models(pipeline)
        self._owns_world = world is None
        self._watch: Stopwatch | None = None
        self._handles: list[Any] = []
        self._assembly: Assembly | None = None
        self._weight_state: dict[str, str] = {}
        self._broken: str | None = None
        asked = resolve_parallel(parallel, ranks_running(world))
        self.parallel = asked or ParallelConfig()
        for model in self._models.values():
            check_sequence(model, self.parallel.sp_degree)
        self._auto: Auto | None = None
        self._options: dict[str, Any] = {"kernel": kernel, "cache": _cache_config(cache)}
        self._options |= {"strict": strict, "fused": fused}
        self.world = world or join(device, timeout_s or 600.0)
        self._timeout_s = timeout_s or self.world.timeout_s
        try:
            self._check_ranks("auto" if asked is None else str(asked))
            if asked is None:
                model, cached = next(iter(self._models.values())), cache is not None
                self._auto = Auto(self.world, pipeline, model, strict=strict, cached=cached)
                self.parallel = self._auto.first()
            self._go_parallel()
        except BaseException:
            self.close()
            raise

    def _check_ranks(self, asked: str) -> None:
        """What all ranks must hold alike; puts the pipeline on this rank's device."""
        check_kernel(self._options["kernel"], self.world.device.kind)
        check_fused(self._options["fused"], self.world.device.kind)
        self.world.agree((asked, self.parallel.transport, str(self._options)), "the parallel configuration")
        move_pipeline(self.pipeline, self.world)
        self._agree_on_weights()

    def _follow(self, arguments: dict[str, Any]) -> None:
        """Take the layout that suits this call's size and guidance, if it was left to us. Collective."""
        config = self._auto.config(arguments) if self._auto else self.parallel
        if config == self.parallel:
            return
        before, self.parallel = self.parallel, config
        self._take_apart()
        try:
            self._go_parallel()
        except Exception as error:
            raise RuntimeError(self._go_back(before, error)) from error

    def _go_back(self, before: ParallelConfig, error: Exception) -> str:
        """Put the layout of before on again; returns why the other could not be. Collective."""
        said = f"this call was to run on {self.parallel}, which failed ({type(error).__name__}: {error})"
        self.parallel = before
        try:
            self._go_parallel()
        except Exception as again:
            self.close()
            raise RuntimeError(
                f"{said}, and so did going back to {before} ({type(again).__name__}: {again}); this "
                "ParallelPipeline is closed; make a new one around the pipeline"
            ) from again
        return f"{said}; {before} is on again, for calls that it suits"

    def _go_parallel(self) -> None:
        """Put the layout on, on all ranks or on none. Collective."""
        try:
            assembly = self.world.all_or_none(f"putting {self.parallel} on", self._assemble)
        except BaseException:
            self._take_apart()
            raise
        for model in self._models.values():
            self._handles.append(model.register_forward_pre_hook(self._before_forward, prepend=True))
        rows = [*start_rows(self.world), ("parallel", str(self.parallel))]
        rows += assembly.groups.rows(communicator_bytes(self.world.backend))
        rows += assembly.rows(self.world.device.torch_device)
        logger.info(format_report("parallel pipeline", rows))

    def _assemble(self) -> Assembly:
        groups = make_groups(self.parallel, rank=self.world.rank, timeout_s=self._timeout_s)
        kind = self.world.device.kind
        self._assembly = assemble(self._models, self.parallel, groups, device_type=kind, **self._options)
        return self._assembly

    def __call__(self, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """The pipeline's result, on every rank.

        `output_type` may differ by rank: with "latent" a rank leaves decoding to another.
        `seed` (None or -1: rank 0 draws one) seeds the noise when no `generator` is given. Generators take
        rank 0's state and are advanced. Collective. Raises ValueError, on all ranks, if ranks pass different
        arguments; RuntimeError once closed, or after a call that failed between steps, since the ranks may
        then be out of step; and, on all ranks, if "auto" cannot change the layout for this call: the one
        before is then on again, or the error says that this object is closed.
        """
        self._usable()
        arguments = bind_call(self.pipeline, args, kwargs)
        self.world.agree(describe_call(arguments), "the call's arguments")
        self.world.agree(describe_scheduler(self.pipeline), "the scheduler's configuration")
        check_pipeline(self.pipeline)
        self._agree_on_weights()
        self._follow(arguments)
        assembly = self._usable()
        generator, used_seed = agree_generator(self.world, arguments.get("generator"), seed)
        arguments["generator"] = generator
        steps_told = self._track_steps(arguments)
        sent_before = self.sent_bytes
        watch = Stopwatch(self.world.device)
        self.step, self.place, self._watch = 0, "step 1", watch
        self.world.device.reset_memory_peak()
        assembly.begin_call(is_last_step=self._is_last_step, steps_told=steps_told)
        try:
            with (
                same_default_rng(self.world, generator),
                scheduler_kept(self.pipeline),
                solved_there(self.pipeline, self.world.device),
                strengths_kept(self.pipeline),
                one_progress_bar(self.pipeline, self.world.is_main),
            ):
                result = with_values(self.pipeline(**arguments))
        except BaseException as error:
            assembly.abandon()
            if watch.encoded is not None and self.world.world_size > 1:
                self._broken = f"{type(error).__name__} after step {self.step}"
            raise
        finally:
            assembly.end_call()
            self._watch = None
        watch.mark_end()
        assembly.check_used(self._steps())
        assembly.tell_cache()
        self.report = collect_report(
            self.world,
            watch,
            seed=used_seed,
            parallel=str(self.parallel),
            tokens=max((here for here, _ in assembly.tokens.values()), default=0),
            sent_bytes=self.sent_bytes - sent_before,
            cache=assembly.cache_report(),
            cache_seconds_saved=assembly.cache_seconds_saved(),
        )
        return result

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has handed to other ranks so far."""
        return sum(self._assembly.groups.sent.values()) if self._assembly else 0

    @property
    def tokens_per_forward(self) -> dict[str, tuple[int, int]]:
        """For each transformer that ran: this rank's tokens and all ranks' tokens in its last forward."""
        return self._assembly.tokens if self._assembly else {}

    def close(self) -> None:
        """Give the pipeline back as it was, on its device; end the process group if this object made it.

        May be called again.
        """
        self._take_apart()
        if self._owns_world and "world" in self.__dict__:
            self.world.close()

    def _take_apart(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._assembly is not None:
            self._assembly.close()
            self._assembly = None

    def __enter__(self) -> "ParallelPipeline":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "pipeline" not in self.__dict__:
            raise AttributeError(name)
        pipeline = self.__dict__["pipeline"]
        value = getattr(pipeline, name)
        if name == "load_lora_weights" and self._assembly is not None:
            return functools.partial(load_lora, pipeline, self.world)
        if not inspect.ismethod(value) or value.__self__ is not pipeline:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return self if result is pipeline else result  # `pipe.to(...)` stays parallel

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        elif name in self._models and self._assembly is not None:
            raise ValueError(
                f"{name} is spread over ranks; close() this ParallelPipeline before you replace it"
            )
        else:
            value = with_flow_settings(self.pipeline, value) if name == "scheduler" else value
            setattr(self.pipeline, name, value)

    def __repr__(self) -> str:
        state = "closed" if self._assembly is None else f"{self.parallel} on {self.world.device}"
        return f"ParallelPipeline({type(self.pipeline).__name__}, {state})"

    def _usable(self) -> Assembly:
        """What is applied. Raises if a call cannot be made."""
        if self._assembly is None:
            raise RuntimeError("this ParallelPipeline is closed; make a new one around the pipeline")
        if self._broken:
            raise RuntimeError(
                f"an earlier call failed ({self._broken}), so the ranks may be out of step; close() this "
                "ParallelPipeline and make a new one"
            )
        for name, model in self._models.items():
            if getattr(self.pipeline, name) is not model:
                raise ValueError(
                    f"{name} was replaced after it was spread over ranks; make a new ParallelPipeline"
                )
        return self._assembly

    def _agree_on_weights(self) -> None:
        """All ranks hold the same weights, in every component; they are read anew once any rank sees a
        change.

        Collective.
        """
        components = {n: c for n, c in self.pipeline.components.items() if isinstance(c, nn.Module)}
        state = {name: weight_state(component) for name, component in components.items()}
        changed = self.world.any(state != self._weight_state)
        if changed and self.world.world_size > 1:
            weights = {name: fingerprint(component) for name, component in components.items()}
            self.world.agree(weights, "the fingerprint of the weights")
        self._weight_state = state

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._watch is None:
            raise RuntimeError(
                "the pipeline inside a ParallelPipeline was called; its ranks would draw unlike noise and "
                "take unlike arguments; call the ParallelPipeline itself, or close() it first"
            )
        self._watch.mark_first_forward()

    def _track_steps(self, arguments: dict[str, Any]) -> bool:
        """Have the pipeline tell us of each step, before the user's own callback; False where it does not."""
        if "callback_on_step_end" not in inspect.signature(self.pipeline.__call__).parameters:
            return False
        users: Any = arguments.get("callback_on_step_end")
        if hasattr(users, "tensor_inputs"):
            arguments["callback_on_step_end_tensor_inputs"] = users.tensor_inputs

        def on_step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            tensors = concrete(tensors)
            self.step = step + 1
            if self._watch is not None:
                self._watch.mark_step()
            if self._assembly is not None:
                self._assembly.end_step()
            if users is not None:
                with self._assembly.aside() if self._assembly is not None else nullcontext():
                    tensors = users(pipeline, step, timestep, tensors)
            if hasattr(pipeline, "_interrupt"):  # whoever stops, stops all
                pipeline._interrupt = self.world.any(bool(pipeline._interrupt))
            last = self.step >= getattr(pipeline, "_num_timesteps", float("inf"))
            self.place = "decoding" if last else f"step {self.step + 1}"  # a callback fails in its own step
            return tensors

        arguments["callback_on_step_end"] = on_step_end
        return True

    def _steps(self) -> int:
        """The steps of a call that has ended: what the pipeline says, else its scheduler."""
        scheduled = getattr(getattr(self.pipeline, "scheduler", None), "timesteps", None)
        told = getattr(self.pipeline, "_num_timesteps", 0)
        return told or (0 if scheduled is None else len(scheduled)) or 1

    def _is_last_step(self) -> bool:
        """Whether the step at hand is the call's last one; False where the pipeline does not tell."""
        return self.step + 1 >= getattr(self.pipeline, "_num_timesteps", float("inf"))


OWN_ATTRIBUTES = frozenset(
    (
        *("pipeline", "step", "place", "report", "parallel", "world"),
        *("_models", "_owns_world", "_watch", "_handles", "_assembly", "_broken", "_weight_state"),
        *("_auto", "_options", "_timeout_s"),
    )
)


def _cache_config(cache: CacheConfig | float | None) -> CacheConfig | None:
    return cache if cache is None or isinstance(cache, CacheConfig) else CacheConfig(threshold=cache)


def _planned_models(pipeline: Any) -> dict[str, Any]:
    """The pipeline's components that have a shard plan, by name. Raises ValueError if there is none."""
    components = {n: c for n, c in getattr(pipeline, "components", {}).items() if isinstance(c, nn.Module)}
    planned = {name: c for name, c in components.items() if type(c).__name__ in PLANS}
    models = {name: c for name, c in planned.items() if not _stands_before(name, planned)}
    if not models:
        for name in ("transformer", "transformer_2", "unet"):
            if name in components:
                plan_for(components[name])
        raise ValueError(
            f"{type(pipeline).__name__} was given; none of its components "
            f"({', '.join(components) or 'none'}) is a transformer with a shard plan; there are plans for "
            f"{', '.join(sorted(PLANS))}"
        )
    for name, model in models.items():
        if getattr(model, "is_cache_enabled", False):
            raise ValueError(
                f"{name} has a cache of diffusers enabled, which decides on each rank by itself; call its "
                "disable_cache() and use ParallelPipeline's cache"
            )
        if any(isinstance(getattr(hook, "__self__", None), ParallelPipeline) for hook in _pre_hooks(model)):
            raise ValueError(
                f"{name} is spread over ranks already, by another ParallelPipeline; close() that one first"
            )
    return models


def _stands_before(name: str, planned: dict[str, Any]) -> bool:
    """Whether the component is the same object as one before it."""
    return any(planned[other] is planned[name] for other in list(planned)[: list(planned).index(name)])


def _pre_hooks(model: nn.Module) -> list[Any]:
    return list(model._forward_pre_hooks.values())
