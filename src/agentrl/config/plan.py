"""Flags of ``agentrl plan``: the GPUs, and what a trajectory is assumed to be."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.fields import Flags, flag


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Flags):
    """The GPUs that are planned for, and the trajectories that they train."""

    section = "plan"

    model: str | None = flag(None, "folder with the model's config.json; weights are not read")
    gpus: str = flag("8xH100", "number and kind of the trainer's GPUs")
    gpu_memory_gib: float | None = flag(
        None, "memory of one GPU (default: that of its kind)", within="(0, inf)", unit="GiB"
    )
    gpus_per_node: int = flag(8, "GPUs of one machine", within="[1, inf)", unit="GPUs")
    network_gbps: float = flag(400.0, "bandwidth between machines, per GPU", within="(0, inf)", unit="Gbit/s")
    memory_reserve: float = flag(
        0.1,
        "fraction of a GPU's memory that is left free: CUDA context, NCCL, workspaces, fragmentation",
        within="[0, 1)",
    )
    context: int = flag(32768, "longest trajectory", within="[2, inf)", unit="tokens")
    trajectory_tokens: int | None = flag(
        None, "mean length of a trajectory (default: --context)", within="[2, inf)", unit="tokens"
    )
    prompt_tokens: int = flag(
        0, "context that the trajectories of a group have in common", within="[0, inf)", unit="tokens"
    )
    turns: int = flag(10, "model calls of a trajectory", within="[1, inf)", unit="model calls")
    trained_share: float = flag(0.5, "fraction of a trajectory's tokens that is generated", within="(0, 1]")
    tool_seconds: float = flag(1.0, "time of the tool calls of one turn", within="[0, inf)", unit="seconds")
    mfu: float = flag(
        0.4, "fraction of the GPU's peak FLOP/s that matrix products are assumed to reach", within="(0, 1]"
    )
    engine_gpu: str | None = flag(None, "kind of an engine's GPU (default: the trainer's)")
    request_tokens_per_second: float = flag(
        30.0, "tokens that an engine generates for one request", within="(0, inf)", unit="tokens/s"
    )
    fitting: int = flag(3, "layouts that fit to show, the fastest ones", within="[1, inf)", unit="layouts")
    json: bool = flag(False, "print JSON")
