"""Check that the trainer and the engines of a placement fit the memory of their GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.chat.model_folder import model_context_length
from agentrl.cli.placement import Placement, ranges
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
from agentrl.errors import ConfigError
from agentrl.inference.engines.process import SHARED_MEMORY
from agentrl.weights.stored_dtype import stored_bytes

_PLAN_SECONDS = 60.0
_OWN_SHARE = 0.85
"""Fraction of a GPU's memory that an engine takes by itself; the defaults of SGLang and vLLM are near it."""
_GIB = 2**30
_OVERRIDE = "--check_memory false starts it all the same"


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
        share = config.inf_mem_ratio or (SHARED_MEMORY if placement.is_shared else _OWN_SHARE)
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
        if placement.is_shared:
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
        return [*words, *(word for name, value in values.items() for word in (f"--{name}", str(value)))]

    def _context(self) -> int:
        """Return the length of the longest trajectory that a call of the model can have."""
        configs = self.configs
        longest = configs[AgentConfig].max_prompt_tokens + configs[SamplingConfig].max_new_tokens
        own = configs[ModelConfig].max_model_len or model_context_length(self.model)
        return min(longest, configs[TrainConfig].max_tokens, own or longest)
