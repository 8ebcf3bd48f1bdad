"""Build AdamW and its schedule, choose which parameters are trained, save and load the optimizer's state."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from agentrl.base.validation import SettingsModel, read_config
from agentrl.config.flags import require
from agentrl.config.schema import MemoryConfig, OptimConfig
from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)


_CONSTANT = frozenset({"constant", "constant_with_warmup"})
_ENDLESS = _CONSTANT | {"inverse_sqrt"}
_DECAY_FRACTION, _DECAY_STEPS = 0.1, 2
"""Fraction of the steps in which ``warmup_stable_decay`` decays by default, and the fewest: a decay of one
step would begin, at the full rate, in the last step."""
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_WEIGHT = "weights."
_UNDECAYED = re.compile("bias|norm|a_log", re.IGNORECASE)
"""Found in the class of a module or in the name of its parameter; ``A_log``: decays of a recurrent state."""
_HYPERPARAMETERS = ("initial_lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True)
class AdamArguments(SettingsModel):
    """What ``--optim_args`` may set."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8


def parse_optim_args(text: str) -> AdamArguments:
    """Parse ``beta1=0.9,beta2=0.98,eps=1e-8``; raise ConfigError for a wrong name or value."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    given = {name.strip(): value.strip() for name, _, value in pairs}
    require(len(given) == len(pairs), f"--optim_args {text} names one argument twice", "name each once")
    return read_config(AdamArguments, given, "--optim_args", hint="write beta1=0.9,beta2=0.999,eps=1e-8")


def build_optimizer(
    model: nn.Module, config: OptimConfig, memory: MemoryConfig | None = None
) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; ``_decayed`` ones have weight decay.

    A parameter group has parameters of one mesh: fused and foreach kernels take no mixture. Logs a warning
    for bfloat16 parameters, whose small updates are lost.
    """
    memory = memory or MemoryConfig()
    arguments = parse_optim_args(config.optim_args)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.dtype == torch.bfloat16 for parameter in trainable):
        logger.warning(
            "the trained weights are bfloat16, which rounds away updates below 1/512 of a weight: at"
            " --learning_rate %g most of them; --dtype float32, the default, keeps them",
            config.learning_rate,
        )
    decayed = _decayed(model)
    groups = [
        {"params": members, "weight_decay": decay}
        for is_decayed, decay in ((True, config.weight_decay), (False, 0.0))
        for members in _by_mesh([item for item in trainable if (id(item) in decayed) is is_decayed])
    ]
    kind = OffloadedAdamW if memory.optimizer_offload else torch.optim.AdamW
    return kind(
        groups,
        lr=config.learning_rate,
        betas=(arguments.beta1, arguments.beta2),
        eps=arguments.eps,
        # Pass None, not False: only then does torch take its foreach kernels on a GPU.
        fused=True if memory.fused_adamw else None,
    )


def _decayed(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that are matrices and neither biases nor of a norm.

    Dimensions alone do not tell: gpt-oss stacks the biases of its experts, and Cohere the norms of its heads.
    """
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() >= 2 and not _UNDECAYED.search(f"{type(module).__name__} {name}")
    }


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return list(groups.values())


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments stay in the host's memory; a device holds those of one parameter at a time.

    The device does the arithmetic, so the weights equal those of AdamW bit by bit. Each step moves 16 bytes
    per float32 parameter in each direction.
    """

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step; ``closure``, if given, computes the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        self.param_groups = [{**group, "params": [parameter]}]
                        self._move(state, parameter, parameter.device)
                        super().step()
                        self._move(state, parameter, torch.device("cpu"))
        finally:
            self.param_groups = groups
        return loss

    @staticmethod
    def _move(state: dict[str, Any], parameter: Tensor, device: torch.device) -> None:
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = value.to(device)


def freeze(model: nn.Module, pattern: str | None) -> int:
    """Stop training parameters whose names ``pattern`` matches anywhere; return how many numbers they hold.

    A tied parameter matches by either of its names. Raises ConfigError for a pattern that is not a regular
    expression, that matches nothing, or that leaves nothing to train.
    """
    if pattern is None:
        return 0
    try:
        matches = re.compile(pattern).search
    except re.error as error:
        raise ConfigError(
            f"--freeze {pattern!r} is not a regular expression: {error}", hint="correct the expression"
        ) from error
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = {name: model.get_parameter(name) for name in names if matches(name)}
    if not found:
        raise ConfigError(
            f"--freeze {pattern!r} finds none of the model's {len(names)} parameters",
            hint=f"match names such as {names[0]} and {names[-1]}",
        )
    if not any(parameter.requires_grad for parameter in found.values()):
        raise ConfigError(
            f"--freeze {pattern!r} finds weights that --lora_rank freezes already",
            hint="match names of adapters, such as lora_A, or leave it out",
        )
    for parameter in found.values():
        parameter.requires_grad = False
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if trained == 0:
        raise ConfigError(f"--freeze {pattern!r} leaves nothing to train", hint="match fewer parameters")
    frozen = sum(parameter.numel() for parameter in {id(p): p for p in found.values()}.values())
    logger.info(
        "%d parameters (%d numbers) are frozen by %r; %d numbers are trained",
        len(found),
        frozen,
        pattern,
        trained,
    )
    return frozen


def schedule_length(items: int, per_step: int, passes: int = 1) -> int:
    """Return how many optimizer steps train ``items`` ``passes`` times; a rest is a step too."""
    return max(1, -(-items * passes // per_step))


def needs_length(config: OptimConfig) -> bool:
    """Return whether the schedule depends on the number of steps."""
    return config.lr_scheduler_type not in _ENDLESS or config.warmup_ratio > 0


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int | None
) -> LambdaLR:
    """Return the schedule: linear warm-up, then ``--lr_scheduler_type`` up to ``total_steps``.

    After warm-up it is ``transformers.get_scheduler`` with ``--lr_scheduler_kwargs``. Two things differ from
    transformers' own warm-up: the first step already learns, and the curve begins where warm-up ends. Steps
    beyond ``total_steps``, which trajectories that wait for another training can make, keep the rate of the
    last one. Raises ConfigError for a curve whose end is unknown, and for wrong arguments.
    """
    if config.lr_scheduler_type not in _ENDLESS and total_steps is None:
        raise ConfigError(
            f"--lr_scheduler_type {config.lr_scheduler_type} has no end to fall to", hint="give --max_steps"
        )
    warmup = config.warmup_steps
    if config.warmup_ratio > 0:
        if total_steps is None:
            raise ConfigError(
                f"--warmup_ratio {config.warmup_ratio} is a fraction of a number of steps that is unknown",
                hint="give --max_steps, or --warmup_steps instead",
            )
        warmup = math.ceil(config.warmup_ratio * total_steps)
    steps = None if total_steps is None else max(1, total_steps - warmup)
    curve = _curve(config, warmup, steps)
    end = math.inf if steps is None or config.lr_scheduler_type in _ENDLESS else steps - 1

    def factor(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else curve(int(min(step - warmup, end)))

    return LambdaLR(optimizer, factor)


def _curve(config: OptimConfig, warmup: int, steps: int | None) -> Callable[[int], float]:
    """Return the factor of the learning rate by steps since the end of warm-up, of ``steps`` in all."""
    from transformers import get_scheduler

    kind = config.lr_scheduler_type
    text = config.lr_scheduler_kwargs
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--lr_scheduler_kwargs is {text!r}: {error}", hint="give JSON, or {}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"--lr_scheduler_kwargs is {text!r}", hint="give a JSON object, or {}")
    unread = given.keys() if kind in _CONSTANT else given.keys() & {"warmup_type"}
    require(
        not unread,
        f"--lr_scheduler_kwargs has {', '.join(sorted(unread))}, which --lr_scheduler_type {kind} does not"
        " read",
        "leave it out: a constant rate has no arguments, and warm-up is linear for every schedule",
    )
    defaults: dict[str, Any] = {}
    if kind == "inverse_sqrt" and warmup:
        defaults = {"timescale": warmup}
    elif kind == "warmup_stable_decay" and steps is not None:
        decay = max(_DECAY_STEPS, math.ceil(_DECAY_FRACTION * steps))
        defaults = {"num_decay_steps": min(steps, decay)}
    # Give it an optimizer of its own: LambdaLR sets the rates of the one that it gets.
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    try:
        scheduler: Any = get_scheduler(kind, unused, 0, steps, scheduler_specific_kwargs=defaults | given)
        curve: Callable[[int], float] = scheduler.lr_lambdas[0]
        # Evaluate it here: arguments that give no number would else be found at the step that meets them.
        first, *later = (curve(step) for step in (0, (steps or 1) // 2, (steps or 1) - 1))
        if not (math.isfinite(first) and first > 0 and all(0 <= factor < math.inf for factor in later)):
            raise ValueError(f"the learning rate is multiplied by {first}, and later by {later}")
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"--lr_scheduler_type {kind} with --lr_scheduler_kwargs {text}: {error}",
            hint="give the arguments of that schedule in transformers, such as"
            " '{\"min_lr_rate\": 0.1}' for cosine_with_min_lr",
        ) from error
    return curve


def optimizer_state(
    model: Any, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return the optimizer's state and ``weights``, parameters of ``model`` by name; collective."""
    if not optimizer.state:  # torch makes a step to have a state, which would count: Adam corrects by it
        get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
        for each in optimizer.state.values():
            each["step"].zero_()
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    return state | {_WEIGHT + name: weight.detach() for name, weight in (weights or {}).items()}


def write_optimizer(folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Write what ``optimizer_state`` returned to ``folder``.

    Each rank of ``group`` writes its shards; None: a single process. Raises OSError if a rank cannot write.
    """
    with _ranks_as_one():
        save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Load what ``write_optimizer`` wrote, possibly with another number of ranks or layout; collective.

    Weights that were saved are copied into the parameters of ``model``.
    Raises OSError, ValueError, KeyError or RuntimeError for damaged files or those of another model.
    """
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {_WEIGHT + name: item.detach() for name, item in model.named_parameters()}
    # Ask for saved keys alone: weights that nothing rounds are not saved, and load raises for them.
    content = state | {key: weight for key, weight in weights.items() if key in saved}
    with _ranks_as_one():
        load(content, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer, {key: content[key] for key in state}, options=_OPTIONS)


@contextlib.contextmanager
def keep_hyperparameters(optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> Iterator[None]:
    """Keep learning rate, betas, eps and weight decay of the flags, whatever the block loads.

    After the block the schedule stands at the step that was loaded.
    """
    groups = [{key: group[key] for key in _HYPERPARAMETERS} for group in optimizer.param_groups]
    rates = list(scheduler.base_lrs)
    yield
    # Set them back: a scheduler's state holds the rates that it was made with.
    scheduler.base_lrs = rates
    for group, kept, rate, factor in zip(
        optimizer.param_groups, groups, rates, scheduler.lr_lambdas, strict=True
    ):
        group.update(kept, lr=rate * factor(scheduler.last_epoch))


@contextlib.contextmanager
def _ranks_as_one() -> Iterator[None]:
    """Raise the error of the lowest rank that failed in the block, which may also be the only process."""
    try:
        with warnings.catch_warnings():
            # torch warns that no process group is initialized.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, OSError):
            raise cause from error
        raise RuntimeError(f"rank {rank}: {cause}") from error
