"""Flags of what one machine runs: `agentrl launch`, and the quickstart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.config.flags import Flags, flag
from agentrl.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(Flags):
    """What `agentrl launch` starts on this machine, and on which GPUs."""

    section = "placement"
    is_per_process = True

    recipe: str | None = flag(
        None,
        "`agentrl launch`: flags of a way to train or evaluate: grpo, minirl, opd, eval, or a YAML file; what"
        " is given otherwise wins over them",
    )

    train_gpus: str | None = flag(
        None,
        "GPUs of the trainer, such as 0-3 or 0,2; with CUDA_VISIBLE_DEVICES, positions in it (default: half"
        " of the GPUs, or those that --engine_gpus leaves)",
    )
    engine_gpus: str | None = flag(
        None,
        "GPUs of the engines; every --inf_tp_size of them run one engine (default: half of the GPUs, or those"
        " that --train_gpus leaves)",
    )
    fit_context: int | None = flag(
        None,
        "`agentrl launch`: limits of prompt, output and micro-batch that are not given follow the model's"
        " context, the memory and those that are, up to this length of prompt and output together",
        within="[2, inf)",
        unit="tokens",
    )
    fit_turns: int | None = flag(
        None,
        "with --fit_context: --max_turns, if it is not given, is at most this, and less for a short context",
        within="[1, inf)",
        unit="model calls",
    )
    check_memory: bool = flag(
        True,
        "refuse to start if a training step, by `agentrl plan`, or an engine's weights need more memory than"
        " their GPUs have",
    )


@dataclass(frozen=True, kw_only=True)
class QuickstartFlags(Flags):
    """What the quickstart trains, and for how long."""

    tiny: bool = flag(False, "a two-layer model made here: four to five minutes")
    steps: int | None = flag(None, "optimizer steps of the whole run", within="[1, inf)")
    minutes: float | None = flag(
        None, "time limit of the training (default: it follows the measured speed)", within="(0, inf)"
    )
    samplers: int = flag(2, "sampler processes", within="[1, inf)")
    task_selection: Literal["order", "pass_rate"] = flag(
        "order", "what is sampled next: the next task, or one whose pass rate is near ½"
    )
    run_name: str | None = flag(None, "name of the run (default: quickstart, or the next free number)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run_name is not None:
            RunConfig(run_name=self.run_name)
