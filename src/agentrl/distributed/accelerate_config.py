"""Read the settings that ``accelerate launch`` passes on, as the flags that they are here.

They come as environment variables, which accelerate's own classes parse. Each setting is used, or refused
with the flag that does it here. A setting with accelerate's default cannot be told from one that was left
out: it leaves the decision to our flags. docs/scaling.md lists the settings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import transformers
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig, parse_flag_from_env
from torch.distributed.fsdp import CPUOffloadPolicy

from agentrl.config.load import Configs
from agentrl.config.schema import ModelConfig, TrainConfig
from agentrl.distributed.mesh import is_first_rank, plan_layout
from agentrl.errors import ConfigError
from agentrl.weights.folder import base_folder, read_config

logger = logging.getLogger(__name__)

T = TypeVar("T")
_FSDP = (
    ("fsdp_version", "2", "set fsdp_version: 2, or: accelerate to-fsdp2 --config_file FILE"),
    ("fsdp_sharding_strategy", "FULL_SHARD", "leave it out: it belongs to FSDP1; HYBRID_SHARD is"
     " parallelism_config_dp_replicate_size (--dp_replicate_size)"),
    ("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "leave it out, or set TRANSFORMER_BASED_WRAP"),
    ("fsdp_min_num_params", "100000000", "leave it out: decoder layers are sharded, one by one"),
)  # fmt: skip
"""Settings of which the trainer has one value: (key, value, what to do with another value)."""
_WITHOUT_EFFECT = {
    "fsdp_forward_prefetch": "false",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_use_orig_params": "true",
    "fsdp_sync_module_states": "true",
    "fsdp_cpu_ram_efficient_loading": "true",
}
"""Settings that change how weights are moved and never a result, with accelerate's defaults."""


@dataclass(frozen=True)
class Setting:
    """A setting of accelerate, as its config file names it, and the flag with its meaning."""

    key: str
    value: object
    flag: str
    flag_value: object

    def __str__(self) -> str:
        """Return it as log lines and errors show it."""
        return f"{self.key} {self.value} is --{self.flag} {str(self.flag_value).lower()}"


def with_launch_settings(configs: Configs) -> Configs:
    """Return ``configs`` with the flags that ``accelerate launch`` set; without it, ``configs`` itself.

    Raises ConfigError for a setting that the trainer does not have, and for one that contradicts a flag.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return configs
    _refuse_other_trainers()
    settings = [*_precision(), *_compilation()]
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        settings += _fsdp(configs[ModelConfig])
    sizes = _parsed("parallelism_config", ParallelismConfig)
    settings += _parallelism(sizes)
    for setting in settings:
        given = _given(configs, setting.flag)
        if given not in (None, setting.flag_value):
            raise ConfigError(
                f"accelerate's {setting}, and --{setting.flag} {given} was given",
                hint="leave one of them out",
            )
    configs = configs.with_flags({setting.flag: setting.flag_value for setting in settings})
    _check_shards(sizes.dp_shard_size, configs[TrainConfig])
    if settings and is_first_rank():
        logger.info("accelerate launch: %s", ", ".join(map(str, settings)))
    return configs


def _refuse_other_trainers() -> None:
    for variable, name in (
        ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"),
        ("ACCELERATE_USE_MEGATRON_LM", "MEGATRON_LM"),
    ):
        if parse_flag_from_env(variable):
            raise _refused("distributed_type", name, "set distributed_type: FSDP with fsdp_version: 2")
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE"):
        raise _refused("debug", True, "leave it out, and export TORCH_DISTRIBUTED_DEBUG=DETAIL instead")


def _precision() -> list[Setting]:
    precision = os.environ["ACCELERATE_MIXED_PRECISION"]
    if precision not in ("no", "bf16"):
        raise _refused(
            "mixed_precision", precision, "set mixed_precision: bf16, which is --autocast_bf16 true; or no"
        )
    if precision == "no":
        return []
    return [Setting("mixed_precision", precision, "autocast_bf16", "true")]


def _compilation() -> list[Setting]:
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if backend == "NO":
        return []
    _require("dynamo_backend", "INDUCTOR", "leave it out, or set INDUCTOR", prefix="ACCELERATE_")
    _require("dynamo_mode", "default", "leave it out", prefix="ACCELERATE_")
    _require("dynamo_use_fullgraph", "False", "leave it out", prefix="ACCELERATE_")
    return [Setting("dynamo_backend", backend, "torch_compile", True)]


def _fsdp(model: ModelConfig) -> list[Setting]:
    for key, only, hint in _FSDP:
        _require(key, only, hint)
    unused = [
        f"{key} {value}"
        for key, default in _WITHOUT_EFFECT.items()
        if (value := os.environ.get(key.upper(), default)).lower() != default.lower()
    ]
    if unused and is_first_rank():
        logger.info("accelerate launch: %s changes no result here: the trainer decides it", ", ".join(unused))
    # With it, transformers' from_pretrained leaves the weights empty on all ranks but 0: accelerate's prepare
    # would fill them.
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    plugin = _parsed("fsdp_config", FullyShardedDataParallelPlugin)
    if not plugin.reshard_after_forward:
        raise _refused("fsdp_reshard_after_forward", False, "leave it out: layers are resharded after use")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise _refused("fsdp_offload_params", True, "leave it out; --optimizer_offload moves the moments")
    if plugin.ignored_modules is not None:
        raise _refused("fsdp_ignored_modules", plugin.ignored_modules, "leave it out: all layers are sharded")
    if plugin.transformer_cls_names_to_wrap is not None:
        _check_wrapped(plugin.transformer_cls_names_to_wrap, model)
    settings = []
    if plugin.activation_checkpointing:
        settings.append(Setting("fsdp_activation_checkpointing", True, "activation_checkpointing", "full"))
    if plugin.activation_checkpointing_offload:
        settings.append(Setting("fsdp_activation_checkpointing_offload", True, "activation_offload", True))
    return settings


def _check_wrapped(names: list[str], model: ModelConfig) -> None:
    """Raise ConfigError if ``fsdp_transformer_layer_cls_to_wrap`` names other classes than decoder layers."""
    folder = base_folder(model)
    kinds = [getattr(transformers, name, None) for name in read_config(folder).get("architectures") or []]
    layers = {layer for kind in kinds for layer in getattr(kind, "_no_split_modules", None) or ()}
    if not {name.strip() for name in names} <= layers:
        raise _refused(
            "fsdp_transformer_layer_cls_to_wrap",
            ",".join(names),
            f"leave it out: decoder layers are sharded, one by one ({', '.join(sorted(layers)) or folder})",
        )


def _parallelism(sizes: ParallelismConfig) -> list[Setting]:
    if sizes.sp_size > 1:
        raise _refused(
            "parallelism_config_sp_size", sizes.sp_size, "use parallelism_config_cp_size (--cp_size)"
        )
    _require("parallelism_config_cp_comm_strategy", "allgather", "leave it out")
    return [
        Setting(f"parallelism_config_{name}", size, name, size)
        for name in ("dp_replicate_size", "tp_size", "cp_size")
        if (size := int(getattr(sizes, name))) > 1
    ]


def _check_shards(size: int, train: TrainConfig) -> None:
    """Raise ConfigError if ``parallelism_config_dp_shard_size`` is not the number of ranks that are left."""
    if size == 1:
        return
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    layout = plan_layout(train, processes)
    if size != layout.dp_shard:
        raise ConfigError(
            f"accelerate's parallelism_config_dp_shard_size is {size}, and the {processes} processes leave"
            f" {layout.dp_shard}: {layout}",
            hint=f"leave it out, or start {processes // layout.dp_shard * size} processes",
        )


def _given(configs: Configs, flag: str) -> Any:
    """Return the value of a flag that was given, or None."""
    if flag not in configs.given:
        return None
    return next(getattr(group, flag) for group in configs if hasattr(group, flag))


def _parsed(section: str, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"accelerate refuses its {section}: {error}",
            hint=f"correct {section} in accelerate's config file",
        ) from error


def _require(key: str, only: str, hint: str, *, prefix: str = "") -> None:
    """Raise ConfigError if accelerate's setting has another value than the ``only`` one the trainer has."""
    value = os.environ.get(prefix + key.upper(), only)
    if value.lower() != only.lower():
        raise _refused(key, value, hint)


def _refused(key: str, value: object, hint: str) -> ConfigError:
    return ConfigError(f"accelerate's {key} is {value}, which this trainer does not have", hint=hint)
