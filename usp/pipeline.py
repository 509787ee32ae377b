"""ParallelPipeline: a user's diffusers pipeline, run by several ranks, with the same call and the same
result."""

import inspect
from typing import Any

import torch.distributed as dist
from torch import nn

from runtime.device import detect_device
from runtime.log import get_logger
from runtime.process_group import World, connect, read_rank_env
from runtime.report import format_bytes, format_report, start_rows
from usp.adapter import Sharded, sharded
from usp.agreement import describe_call, describe_scheduler, fingerprint
from usp.attention import SequenceAttention
from usp.attention.interop import external_attention
from usp.attention.kernels import check_kernel
from usp.branches import Branches
from usp.cfg_parallel import BranchExchange, CfgParallel
from usp.config import ParallelConfig, resolve_parallel
from usp.deferred import concrete
from usp.mesh import make_groups
from usp.plans import PLANS, plan_for
from usp.randomness import agree_generator, same_default_rng
from usp.report import CallReport, Stopwatch, collect_report

logger = get_logger(__name__)


class ParallelPipeline:
    """A diffusers pipeline whose transformers are spread over all ranks, until `close()`.

    The call takes what the pipeline takes, and `seed`; the result is the same on every rank, and equal to one
    process's. Any other attribute (`scheduler`, `vae`, `load_lora_weights`, ...) is the pipeline's own, to
    read and to set. The pipeline is moved to this rank's device unless it is offloaded.

    `parallel` is "auto", a spelling such as "ulysses2 ring2", or a ParallelConfig; `kernel` names the local
    attention kernel. A process group that exists is used and left alone, else one is made and ended by
    `close()`. All ranks must make it, and call it, alike: same weights, same arguments; both are checked.
    Raises ValueError, on all ranks, for a model without a plan, degrees that do not fit, or ranks that
    differ.
    """

    def __init__(
        self,
        pipeline: Any,
        parallel: ParallelConfig | str = "auto",
        *,
        kernel: str = "auto",
        device: str | None = None,
        world: World | None = None,
        timeout_s: float = 600.0,
        strict: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.step = 0  # steps done in the call at hand, or in the last one
        self.report: CallReport | None = None
        self._models = _planned_models(pipeline)
        self._owns_world = world is None
        self._watch: Stopwatch | None = None
        self._handles: list[Any] = []
        self._sharded: dict[str, Sharded] = {}
        self._branches: dict[str, Branches] = {}
        self._cfg: dict[str, CfgParallel] = {}
        self._exchange: BranchExchange | None = None
        self._engine: Any = None
        self._strict = strict
        self._broken: str | None = None
        self._progress_bar_config = dict(getattr(pipeline, "_progress_bar_config", {}))
        self._groups = None
        self.parallel = resolve_parallel(parallel, _ranks_running(world), heads=_heads(self._models))
        self.world = world or _connect(device, timeout_s)
        try:
            self._go_parallel(kernel, timeout_s)
        except BaseException:
            self.close()
            raise

    def _go_parallel(self, kernel: str, timeout_s: float) -> None:
        check_kernel(kernel, self.world.device.kind)
        self.world.agree((str(self.parallel), self.parallel.transport, kernel), "the parallel configuration")
        _move(self.pipeline, self.world)
        weights = {name: fingerprint(model) for name, model in self._models.items()}
        self.world.agree(weights, "the fingerprint of the weights")
        self._groups = make_groups(self.parallel, rank=self.world.rank, timeout_s=timeout_s)
        self._engine = external_attention(self.parallel, self._groups, kernel=kernel)
        attention = SequenceAttention(self._groups, kernel, self._engine)
        for name, model in self._models.items():
            self._handles.append(model.register_forward_pre_hook(self._before_forward, prepend=True))
            if self.parallel.sp_degree > 1:
                self._sharded[name] = sharded(model, plan_for(model), attention)
        if self.parallel.cfg_degree > 1:
            self._exchange = BranchExchange(self._groups.cfg)
            for name, model in self._models.items():
                self._branches[name] = Branches(model)
                self._cfg[name] = CfgParallel(
                    model, plan_for(model), self._exchange, self._branches[name], strict=self._strict
                )
        if not self.world.is_main and hasattr(self.pipeline, "set_progress_bar_config"):
            self.pipeline.set_progress_bar_config(**{**self._progress_bar_config, "disable": True})
        logger.info(format_report("parallel pipeline", self._start_rows(attention)))

    def __call__(self, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """The pipeline's result, on every rank.

        `output_type` may differ by rank: with "latent" a rank leaves decoding to another.
        `seed` (None or -1: rank 0 draws one) seeds the noise when no `generator` is given. Generators take
        rank 0's state and are advanced. Collective. Raises ValueError, on all ranks, if ranks pass different
        arguments; RuntimeError once closed, or after a call that failed between steps, since the ranks may
        then be out of step.
        """
        self._check_usable()
        arguments = self._bind(args, kwargs)
        self.world.agree(describe_call(arguments), "the call's arguments")
        self.world.agree(describe_scheduler(self.pipeline), "the scheduler's configuration")
        generator, used_seed = agree_generator(self.world, arguments.get("generator"), seed)
        arguments["generator"] = generator
        self._track_steps(arguments)
        sent_before = self.sent_bytes
        for part in (*filter(None, [self._exchange]), *self._cfg.values()):
            part.begin_call()
        self.step, self._watch = 0, Stopwatch(self.world.device)
        self.world.device.reset_memory_peak()
        try:
            with same_default_rng(self.world):
                result = _with_values(self.pipeline(**arguments))
        except BaseException as error:
            if self._watch.encoded is not None and self.world.world_size > 1:
                self._broken = f"{type(error).__name__} after step {self.step}"
            raise
        self._watch.mark_end()
        self.report = collect_report(
            self.world,
            self._watch,
            seed=used_seed,
            parallel=str(self.parallel),
            tokens=max((s.tokens_here for s in self._sharded.values()), default=0),
            sent_bytes=self.sent_bytes - sent_before,
        )
        return result

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has handed to other ranks so far."""
        return sum(self._groups.sent.values()) if self._groups else 0

    @property
    def tokens_per_forward(self) -> dict[str, tuple[int, int]]:
        """For each transformer that ran: this rank's tokens and all ranks' tokens in its last forward."""
        return {n: (s.tokens_here, s.tokens_total) for n, s in self._sharded.items() if s.tokens_total}

    def close(self) -> None:
        """Give the pipeline back as it was, on its device; end the process group if this object made it.

        May be called again.
        """
        for part in (*self._cfg.values(), *self._branches.values(), *self._sharded.values()):
            part.close()
        for handle in self._handles:
            handle.remove()
        self._cfg, self._branches, self._sharded, self._handles = {}, {}, {}, []
        if hasattr(self.pipeline, "_progress_bar_config"):
            self.pipeline.set_progress_bar_config(**self._progress_bar_config)
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        if self._owns_world and "world" in self.__dict__:
            self.world.close()

    def __enter__(self) -> "ParallelPipeline":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "pipeline" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["pipeline"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN_ATTRIBUTES or name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._models:
            raise ValueError(
                f"{name} is spread over ranks; close() this ParallelPipeline before you replace it"
            )
        else:
            setattr(self.pipeline, name, value)

    def __repr__(self) -> str:
        state = "closed" if self._groups is None else f"{self.parallel} on {self.world.device}"
        return f"ParallelPipeline({type(self.pipeline).__name__}, {state})"

    def _check_usable(self) -> None:
        if self._groups is None:
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

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name. Raises ValueError that names an unknown one."""
        signature = inspect.signature(self.pipeline.__call__)
        try:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise ValueError(
                f"{type(self.pipeline).__name__}: {error}; its call takes {signature}"
            ) from error
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name, {}))
        return arguments

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._watch is not None:
            self._watch.mark_first_forward()

    def _track_steps(self, arguments: dict[str, Any]) -> None:
        """Have the pipeline tell us of each step, before the user's own callback."""
        if "callback_on_step_end" not in inspect.signature(self.pipeline.__call__).parameters:
            return
        users: Any = arguments.get("callback_on_step_end")
        if hasattr(users, "tensor_inputs"):
            arguments["callback_on_step_end_tensor_inputs"] = users.tensor_inputs

        def on_step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            tensors = concrete(tensors)
            self.step = step + 1
            if self._watch is not None:
                self._watch.mark_step()
            return tensors if users is None else users(pipeline, step, timestep, tensors)

        arguments["callback_on_step_end"] = on_step_end

    def _start_rows(self, attention: SequenceAttention) -> list[tuple[str, str]]:
        rows = [*start_rows(self.world), ("parallel", str(self.parallel))]
        for name, model in self._models.items():
            heads, dim = (
                model.config[c] for c in (plan_for(model).head_config, plan_for(model).head_dim_config)
            )
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            copies = "" if self.world.world_size == 1 else f", weights replicated x{self.world.world_size}"
            shard = self._sharded.get(name)
            patched = f", {shard.attention_modules} attention modules over ranks" if shard else ""
            rows.append(
                (name, f"{type(model).__name__}, {format_bytes(size)}{copies}, {heads} heads{patched}")
            )
            if heads < self.parallel.ulysses_degree:
                logger.warning(
                    "ulysses_degree=%d with %d heads: %d ranks have no attention to compute; ring or "
                    "gather_kv would "
                    "use them", self.parallel.ulysses_degree, heads, self.parallel.ulysses_degree - heads
                )  # fmt: skip
            if shard:
                dtype = next(model.parameters()).dtype
                rows.append(("kernel", attention.chosen_kernel(dtype, dim, self.world.device.torch_device)))
        return rows


OWN_ATTRIBUTES = ("pipeline", "step", "report", "parallel", "world")  # and all with an underscore


def _with_values(result: Any) -> Any:
    """A pipeline's result with plain tensors, where a branch's value was not needed until now."""
    if isinstance(result, dict):  # a diffusers output
        for name, value in result.items():
            result[name] = concrete(value)
        return result
    return concrete(result)


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


def _heads(models: dict[str, Any]) -> int:
    model = next(iter(models.values()))
    return model.config[plan_for(model).head_config]


def _ranks_running(world: World | None) -> int:
    """The world size, known before any group exists."""
    if world is not None:
        return world.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return read_rank_env().world_size


def _connect(choice: str | None, timeout_s: float) -> World:
    env = read_rank_env()
    device = detect_device(choice, local_rank=env.local_rank, world_size=env.world_size)
    return connect(device, env=env, timeout_s=timeout_s)


def _move(pipeline: Any, world: World) -> None:
    """Put the pipeline on this rank's device, unless offload hooks or a device map place it."""
    placed = getattr(pipeline, "hf_device_map", None) or any(
        hasattr(c, "_hf_hook") or hasattr(c, "_diffusers_hook")
        for c in pipeline.components.values()
        if isinstance(c, nn.Module)
    )
    if not placed and world.device.kind != "cpu":
        pipeline.to(world.device.torch_device)
