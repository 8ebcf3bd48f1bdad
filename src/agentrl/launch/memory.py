"""Fit a run's limits to its model, and its processes to the memory of their GPUs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.chat.model_folder import model_context_length
from agentrl.config.agreement import require_trainable
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
from agentrl.errors import ConfigError
from agentrl.inference.engines.commands import SHARED_MEMORY
from agentrl.launch.gpus import GIB
from agentrl.launch.placement import Placement, ranges
from agentrl.launch.processes import environment_of_children
from agentrl.weights.folder import stored_bytes

LONGEST_OUTPUT = 32768
_SHORTEST = 2048
"""Shortest context that ``--fit_context`` tries."""
_TURN = 256
"""Fewest tokens of context that a turn is expected to take."""
_MASK_BYTES = 16
"""Memory of a machine without GPUs for each pair of tokens: a dense float32 mask may take a quarter of it."""
_PLAN_SECONDS = 60.0
_OWN_SHARE = 0.85
"""Fraction of a GPU's memory that an engine takes by itself; the defaults of SGLang and vLLM are near it."""
_OVERRIDE = "--check_memory false starts it all the same"


def fit(
    configs: Configs,
    flags: Sequence[str],
    placement: Placement | None,
    machines: int,
    report: Callable[[str], None],
    *,
    is_training: bool,
) -> list[str]:
    """Return ``flags`` with the limits of ``--fit_context``, halved until a training step fits the GPUs.

    Raises ConfigError for limits that contradict one another, and for a model that does not fit.
    """
    model, longest = str(configs[ModelConfig].model_name_or_path), configs[PlacementConfig].fit_context
    if longest is not None and placement is None:  # the attention mask has to fit the memory of this machine
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        longest = min(longest, math.isqrt(memory // _MASK_BYTES))
    while True:
        limits = {} if longest is None else fitted_limits(configs, model, longest)
        words = flag_words(limits)
        fitted = configs.with_flags(limits)
        if is_training:
            require_trainable(fitted)
        try:
            if placement is not None:
                MemoryCheck(
                    configs=fitted, flags=[*words, *flags], model=model, machines=machines, report=report
                ).check(placement, environment_of_children())
        except StepTooLargeError as error:
            total = fitted[AgentConfig].max_prompt_tokens + fitted[SamplingConfig].max_new_tokens
            if not {"max_prompt_tokens", "max_new_tokens"} & limits.keys() or total < 2 * _SHORTEST:
                raise
            longest = total // 2
            report(f"{error.message}: trying a context of {longest} tokens")
            continue
        if words:
            report(f"limits: {' '.join(words)}")
        return [*words, *flags]


def fitted_limits(configs: Configs, model: str, longest: int) -> dict[str, int]:
    """Return the limits that were not given, by flag.

    Prompt and output together take ``longest`` tokens, the model's context or a given ``--max_tokens``,
    whichever is least; a given limit of one changes the other. Raises ConfigError if a given limit leaves
    nothing for the other.
    """
    agent, sampling, train = configs[AgentConfig], configs[SamplingConfig], configs[TrainConfig]
    given = configs.given
    own = configs[ModelConfig].max_model_len or model_context_length(model)
    total = min(longest, own or longest, *([train.max_tokens] if "max_tokens" in given else []))
    prompt, output = agent.max_prompt_tokens, sampling.max_new_tokens
    if not {"max_prompt_tokens", "max_new_tokens"} <= given:
        for name, value in (("max_prompt_tokens", prompt), ("max_new_tokens", output)):
            if name in given and value >= total:
                raise ConfigError(
                    f"--{name} is {value}, and prompt and output have {total} tokens together",
                    hint=f"lower it; the model's context is {own or 'unknown'}, and --max_tokens and"
                    " --fit_context limit both",
                )
        if "max_new_tokens" not in given:
            left = total - prompt if "max_prompt_tokens" in given else max(1, total // 4)
            output = min(LONGEST_OUTPUT, left)
        if "max_prompt_tokens" not in given:
            prompt = total - output
    limits = {
        "max_prompt_tokens": prompt,
        "max_new_tokens": output,
        "max_tokens": prompt + output,
        "prompt_reserve_tokens": min(agent.prompt_reserve_tokens, prompt // 8),
    }
    turns = configs[PlacementConfig].fit_turns
    if turns is not None:
        limits["max_turns"] = min(turns, max(1, prompt // _TURN))
    return {name: value for name, value in limits.items() if name not in given}


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
        weights = stored_bytes(Path(self.model)) / GIB
        memory = min(placement.gpus.memory_gib[number] for group in placement.engines for number in group)
        share = config.inf_mem_ratio or (placement.engine_share if placement.shared else _OWN_SHARE)
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
        layouts, limit = plan["layouts"], plan["gpus"]["planned_bytes"] / GIB
        fitting = next((each for each in layouts if each["state"] == "fits"), None)
        if fitting is not None:
            peak = fitting["peak_bytes"] / GIB
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
