"""Find the GPUs of this machine, divide them among a run's processes, and check that these fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.chat.model_folder import model_context_length
from agentrl.cli.placement import Gpus, Need, Placement, place, ranges
from agentrl.config.arguments import flag_words
from agentrl.config.load import Configs
from agentrl.config.run import without_uri
from agentrl.config.schema import (
    AgentConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    PlacementConfig,
    SamplingConfig,
    TrainConfig,
)
from agentrl.device_lease import has_gpu
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.engines.commands import COLOCATED_MEMORY, SHARED_MEMORY
from agentrl.weights.folder import stored_bytes

_PROBE_SECONDS = 120.0
_GIB = 2**30
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_PROBE = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([torch.version.hip is not None, [[gpu.name, gpu.total_memory] for gpu in found]]))
"""
_PLAN_SECONDS = 60.0
_OWN_SHARE = 0.85
"""Fraction of a GPU's memory that an engine takes by itself; the defaults of SGLang and vLLM are near it."""
_OVERRIDE = "--check_memory false starts it all the same"


class UnseenGpuError(AgentRLError):
    """The machine has a GPU, and torch does not see it."""


def find_gpus(environment: Mapping[str, str]) -> Gpus | None:
    """Return the GPUs that torch sees under ``environment``; None on a machine without, or if it hides them.

    A child process imports torch, which knows the driver, MIG instances and the variables that hide GPUs.
    Raises UnseenGpuError.
    """
    if not has_gpu():
        return None
    shown = next((name for name in _VISIBLE if name in environment), None)
    if shown is not None and environment[shown].strip() in ("", "-1"):
        return None
    names = [] if shown is None else [name.strip() for name in environment[shown].split(",")]
    order = {} if shown else {"CUDA_DEVICE_ORDER": environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    views = [dict(environment) | order]
    if shown and names[0].startswith("MIG-"):  # CUDA shows a process the first MIG instance only
        views = [{**environment, shown: name} for name in names]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(_probe, views))
    seen = [gpu for _, gpus in answers for gpu in gpus]
    if not seen:
        raise UnseenGpuError("torch sees no GPU", hint="agentrl doctor names the cause")
    return Gpus(
        names=tuple(names or map(str, range(len(seen))))[: len(seen)],
        kind=" and ".join(dict.fromkeys(name for name, _ in seen)),
        memory_gib=tuple(size / _GIB for _, size in seen),
        variable=shown or ("HIP_VISIBLE_DEVICES" if answers[0][0] else "CUDA_VISIBLE_DEVICES"),
        order=order,
    )


def _probe(environment: Mapping[str, str]) -> tuple[bool, list[tuple[str, int]]]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=without_uri(environment), capture_output=True, text=True,
            timeout=_PROBE_SECONDS, check=True,
        )  # fmt: skip
        is_amd, gpus = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise UnseenGpuError(f"torch cannot look for GPUs: {said[-1]}", hint="agentrl doctor") from error
    return is_amd, [(name, size) for name, size in gpus]


def place_processes(
    configs: Configs, report: Callable[[str], None], *, trains: bool, serves: bool, machines: int = 1
) -> Placement | None:
    """Divide this machine's GPUs among the engines and the trainer that run here; None if none gets one.

    ``report`` receives a line about the result. ``machines``: those of the trainer. Raises ConfigError if the
    flags name GPUs that do not exist, or if they are too few.
    """
    if not trains and not serves:
        return None
    flags = configs[PlacementConfig]
    try:
        gpus, missing = find_gpus(os.environ), "there is no GPU here"
    except UnseenGpuError as error:
        gpus, missing = None, error.message
        report(f"no GPU is assigned to a process: {error.message}; {error.hint}")
    if gpus is None:
        named = [name for name in ("train_gpus", "engine_gpus") if getattr(flags, name) is not None]
        if named:
            raise ConfigError(f"--{named[0]} is given, and {missing}", hint=f"leave out --{named[0]}")
        return None
    has_images = _has_images(configs[ModelConfig].model_name_or_path)
    need = Need.of(configs, gpus, trains=trains, serves=serves, machines=machines, has_images=has_images)
    placement = place(gpus, flags, need)
    share = configs[EngineConfig].inf_mem_ratio or shared_memory(placement)
    note = f"; the engine takes {share:g} of its memory (--inf_mem_ratio)" if placement.shared else ""
    report(f"{placement}{note}")
    return placement


def shared_memory(placement: Placement) -> float:
    """Return the default fraction of memory for an engine on a GPU of the trainer."""
    return COLOCATED_MEMORY if placement.is_colocated else SHARED_MEMORY


def _has_images(folder: str | None) -> bool:
    try:
        return "vision_config" in json.loads(Path(folder or "", "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


class StepTooLargeError(ConfigError):
    """A training step does not fit the memory of the trainer's GPUs."""


@dataclass(frozen=True, kw_only=True)
class MemoryCheck:
    """Compares the memory that a placement needs with that of its GPUs."""

    configs: Configs
    flags: Sequence[str]
    """The run's flags, which the trainer gets."""
    model: str
    """Folder of the model."""
    machines: int = 1
    """Machines that the trainer runs on, each with as many GPUs as this one."""
    report: Callable[[str], None]

    def check(self, placement: Placement, environment: Mapping[str, str]) -> None:
        """Raise ConfigError if the weights of an engine do not fit, StepTooLargeError if a step does not."""
        if not self.configs[PlacementConfig].check_memory:
            return
        if placement.engines:
            self._check_engines(placement)
        if placement.trainer:
            self._check_trainer(placement, environment)

    def _check_engines(self, placement: Placement) -> None:
        config = self.configs[EngineConfig]
        weights = stored_bytes(Path(self.model)) / _GIB
        memory = min(placement.gpus.memory_gib[number] for group in placement.engines for number in group)
        share = config.inf_mem_ratio or (shared_memory(placement) if placement.shared else _OWN_SHARE)
        limit = memory * share
        if weights / config.inf_tp_size > limit:
            raise ConfigError(
                f"an engine's GPU needs {weights / config.inf_tp_size:.1f} GiB for weights alone, and"
                f" an engine takes {limit:.1f} of {memory:.1f} GiB (--inf_mem_ratio {share:g})",
                hint=f"raise --inf_mem_ratio, or set --inf_tp_size {2 * config.inf_tp_size}; {_OVERRIDE}",
            )

    def _check_trainer(self, placement: Placement, environment: Mapping[str, str]) -> None:
        """Plan a step with a full micro-batch by ``agentrl plan``, in a process of its own."""
        memory = min(placement.gpus.memory_gib[number] for number in placement.trainer)
        if placement.shared and not placement.is_colocated:
            memory *= 1 - (self.configs[EngineConfig].inf_mem_ratio or SHARED_MEMORY)
        gpus = len(placement.trainer) * self.machines
        cluster = ["--gpus", f"{gpus}xH100", "--gpu_memory_gib", f"{memory:.2f}"]
        command = [
            *(sys.executable, "-m", "agentrl", "plan", *self.flags, *cluster, *self._workload()),
            *("--gpus_per_node", str(len(placement.trainer))),
            *("--fitting", "1", "--json"),
        ]
        self.report("agentrl plan computes the memory of a training step, to see whether it fits")
        try:
            done = subprocess.run(
                command, env=without_uri(environment), capture_output=True, text=True, timeout=_PLAN_SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.report(f"the trainer's memory is not checked: no answer in {_PLAN_SECONDS:g} s")
            return
        try:
            plan = json.loads(done.stdout)
        except ValueError:
            said = done.stderr.strip().splitlines()
            self.report(f"the trainer's memory is not checked: {said[0] if said else 'no answer'}")
            return
        self._judge(plan, placement, cluster)

    def _judge(self, plan: Mapping[str, Any], placement: Placement, cluster: Sequence[str]) -> None:
        layouts, limit = plan["layouts"], plan["gpus"]["planned_bytes"] / _GIB
        fitting = next((each for each in layouts if each["state"] == "fits"), None)
        if fitting is not None:
            peak = fitting["peak_bytes"] / _GIB
            self.report(f"a training step needs {peak:.1f} of {limit:.1f} GiB a GPU (agentrl plan)")
            return
        reasons = [each["reason"] for each in (*layouts, *plan["refused"]) if each["reason"]]
        if not reasons:
            self.report("the trainer's memory is not checked: agentrl plan lists no layout")
            return
        raise StepTooLargeError(
            f"the trainer does not fit GPU {ranges(placement.trainer)}: {reasons[0]}",
            hint=f"agentrl plan --model {self.model} {' '.join(cluster)} --context {self._context()} lists"
            f" layouts that fit; or more GPUs by --train_gpus; {_OVERRIDE}",
        )

    def _workload(self) -> list[str]:
        """Return the flags of the longest trajectory, and those of the layout, which are not searched."""
        train = self.configs[TrainConfig]
        sizes = {name: getattr(train, name) for name in vars(ParallelConfig()) if name.endswith("_size")}
        values = {"context": self._context(), "max_tokens": train.max_tokens, **sizes}
        named = {"activation_checkpointing", "gradient_checkpointing"} & self.configs.given
        words = [] if named else ["--activation_checkpointing", "none"]
        return [*words, *flag_words(values)]

    def _context(self) -> int:
        """Return the length of the longest trajectory that a call of the model can have."""
        configs = self.configs
        longest = configs[AgentConfig].max_prompt_tokens + configs[SamplingConfig].max_new_tokens
        own = configs[ModelConfig].max_model_len or model_context_length(self.model)
        return min(longest, configs[TrainConfig].max_tokens, own or longest)
