"""Every flag of a run, a dataclass per concern. Field metadata ``help`` is what ``--help`` prints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from agentrl.config.fields import flag, require, require_positive
from agentrl.config.groups import GroupConfig
from agentrl.config.learning import AdapterConfig, OptimConfig
from agentrl.config.loss import LossConfig
from agentrl.config.memory import MemoryConfig

__all__ = [
    "GROUPS", "AdapterConfig", "AgentConfig", "ClaimConfig", "EngineConfig", "GroupConfig", "LossConfig",
    "MemoryConfig", "ModelConfig", "OptimConfig", "RunConfig", "SamplingConfig", "TaskConfig",
    "TrainConfig", "flag",
]  # fmt: skip

SYSTEM_DATABASES = frozenset({"admin", "config", "local"})
_MISSED_HEARTBEATS = 5


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Which run this is, and where its things are."""

    run_name: str = flag("default", "name of the run; also the name of its database")
    output_dir: str | None = flag(None, "checkpoints and published weights (default: output/RUN_NAME)")
    log_dir: str = flag("logs", "one log file a process")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = flag("INFO", "lowest level that is logged")
    seed: int = flag(0, "seed of task order, sampling and training")
    db_connection_string: str | None = flag(
        None, "MongoDB URI, 6.0 or newer, a replica set (default: the embedded server under --mongo_dir)",
        repr=False,
    )  # fmt: skip
    mongo_dir: str = flag(".agentrl/mongo", "folder of the embedded MongoDB")
    db_timeout_seconds: float = flag(10.0, "how long one database operation may take")
    db_wait_seconds: float = flag(
        90.0,
        "how long a process waits for a database that is away before it gives up (0: not at all; inf: for"
        " ever)",
    )

    def __post_init__(self) -> None:
        require_positive(self, "db_timeout_seconds")
        require(self.db_wait_seconds >= 0, f"--db_wait_seconds is {self.db_wait_seconds}", "0 does not wait")
        require(
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}", self.run_name)),
            f"--run_name is {self.run_name!r}",
            "use up to 48 letters, digits, '_' and '-': it names the database and the folders",
        )
        require(
            self.run_name.lower() not in SYSTEM_DATABASES,
            f"--run_name is {self.run_name!r}, the name of one of MongoDB's own databases",
            "choose another name: the run's database is named after it",
        )

    @property
    def output(self) -> str:
        """The run's output folder."""
        return self.output_dir or f"output/{self.run_name}"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy's model."""

    model_name_or_path: str | None = flag(None, "Hugging Face folder of the model that the run starts from")
    model_name: str = flag("train-model", "name under which engines serve the policy")
    reference_model: str | None = flag(
        None, "Hugging Face folder that --kl_coef keeps the policy near (default: --model_name_or_path)"
    )
    dtype: Literal["float32", "bfloat16"] = flag("float32", "dtype of weights and activations")
    trust_remote_code: bool = flag(False, "run Python code that comes with the model")
    chat_template: str | None = flag(None, "file of a chat template that replaces the model's own")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The tasks, their epochs and their groups."""

    train_file: str | None = flag(None, "JSONL or JSON file of training tasks")
    eval_file: str | None = flag(None, "JSONL or JSON file of evaluation tasks")
    num_train_epochs: int = flag(1, "how often the training tasks are sampled")
    num_generations: int = flag(8, "trajectories per task: the size of a group")
    skip_bad_lines: bool = flag(False, "load the good lines of a file that has bad ones")
    shuffle_tasks: bool = flag(True, "shuffle each epoch's tasks by --seed")
    task_selection: Literal["order", "pass_rate"] = flag(
        "order",
        "which task is sampled next: the next of the epoch, or also a later epoch's copy of one whose pass"
        " rate is near ½",
    )
    allowed_modules: str = flag(
        "", "modules or packages, separated by commas, whose functions tasks may name as module:function,"
        " beside those that --train_file, --eval_file or a loaded task file names",
    )  # fmt: skip

    @property
    def allowed_names(self) -> frozenset[str]:
        """``--allowed_modules`` as a set."""
        return frozenset(name.strip() for name in self.allowed_modules.split(",") if name.strip())

    def __post_init__(self) -> None:
        require_positive(self, "num_train_epochs", "num_generations")
        require(
            self.task_selection == "order" or self.num_train_epochs > 1,
            f"--task_selection is {self.task_selection}, and --num_train_epochs 1 lets no task be sampled"
            " twice",
            "raise --num_train_epochs: it bounds how often one task may be sampled",
        )


@dataclass(frozen=True, kw_only=True)
class ClaimConfig:
    """Leases and retries of sampling claims."""

    lease_seconds: float = flag(60.0, "a claim, or the trainer's place, not renewed for this long is free")
    max_attempts: int = flag(3, "attempts at a trajectory before its slot is failed for good")
    retry_backoff_seconds: float = flag(2.0, "wait before the second attempt; doubles with each further one")

    def __post_init__(self) -> None:
        require_positive(self, "lease_seconds", "max_attempts", "retry_backoff_seconds")

    @property
    def heartbeat_seconds(self) -> float:
        """How often a claim is renewed: three tries within a lease."""
        return self.lease_seconds / 3


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """One trajectory: its agent, its turns, its context."""

    agent_name: str = flag("react", "agent of tasks that name none")
    system_prompt: str | None = flag(None, "system prompt of tasks that bring none")
    query_prompt: str | None = flag(None, "template of the user message, with {query}, for tasks without one")
    max_turns: int = flag(16, "model calls per trajectory")
    max_prompt_tokens: int = flag(32768, "longest prompt; a longer context is reset or ends the trajectory")
    prompt_reserve_tokens: int = flag(1024, "a context is full at max_prompt_tokens less these")
    new_context: str = flag(
        "disabled",
        "context manager, called when the context is full: disabled (ends the trajectory), discard_all_tools"
        " (drops tool results), discard_all (starts from a summary), or your own as module:name",
    )
    repetition_early_stop_times: int = flag(-1, "end after the same assistant text this often (-1: never)")
    enable_repetition_compress: bool = flag(False, "reset the context on repetition instead of ending")
    tool_call_parser: str = flag(
        "hermes", "how tool calls are written: hermes, qwen, llama, minicpm, …, or your own as module:name"
    )
    tools: str = flag(
        "",
        "Python tools, comma-separated: module:name of functions or classes, or registered names",
    )
    mcp_manager_url: str | None = flag(None, "MCP manager (…/mcpapi) or MCP streamable-HTTP endpoint")
    mcp_server_name: str = flag("all", "server to use behind --mcp_manager_url")
    mcp_servers_file: str | None = flag(None, "YAML file of MCP servers by name (command or url)")
    mcp_auth_token_env: str = flag("MCP_AUTH_TOKEN", "environment variable with the MCP bearer token")
    tool_timeout_seconds: float = flag(60.0, "how long one tool call may take")
    max_tool_result_chars: int = flag(32768, "a longer tool result is cut, with a notice to the model")
    trajectory_timeout_seconds: float = flag(3600.0, "how long one trajectory may take")

    def __post_init__(self) -> None:
        require_positive(
            self, "max_turns", "max_prompt_tokens", "tool_timeout_seconds", "trajectory_timeout_seconds",
            "max_tool_result_chars",
        )  # fmt: skip
        require(
            self.max_prompt_tokens > self.prompt_reserve_tokens >= 0,
            f"--max_prompt_tokens {self.max_prompt_tokens} leaves nothing beside"
            f" --prompt_reserve_tokens {self.prompt_reserve_tokens}",
            "raise --max_prompt_tokens or lower --prompt_reserve_tokens",
        )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How samplers sample."""

    max_new_tokens: int = flag(8196, "tokens per model call")
    preferred_sampling_params: str = flag(
        "{}", 'JSON of sampling parameters, e.g. \'{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}\''
    )
    max_concurrent_samples_per_process: int = flag(16, "trajectories that one sampler runs at a time")
    target_concurrency: int = flag(1, "sampler workers that `agentrl sample` starts in its process")
    max_staleness: int = flag(1, "how many optimizer steps old a trained trajectory may be")
    sync_sampling: bool = flag(False, "sample a step's groups only after the step before has been published")
    engine_timeout_seconds: float = flag(600.0, "how long one model call may take")
    engine_wait_seconds: float = flag(300.0, "how long a call waits for an engine to appear or resume")
    scorer_timeout_seconds: float = flag(120.0, "how long one scoring may take")
    idle_exit_seconds: float | None = flag(None, "leave after this long without work (default: stay)")
    agent_config_path: str = flag("assets/agent_config.yml", "endpoints of the judge and the browse agent")
    resample_error_records: bool = flag(False, "re-open failed slots when the sampler starts")

    def __post_init__(self) -> None:
        require_positive(
            self, "max_new_tokens", "max_concurrent_samples_per_process", "target_concurrency",
            "engine_timeout_seconds", "engine_wait_seconds", "scorer_timeout_seconds", "idle_exit_seconds",
        )  # fmt: skip
        require(self.max_staleness >= 0, f"--max_staleness is {self.max_staleness}", "0 is fully on-policy")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    max_steps: int = flag(-1, "optimizer steps of the whole run (-1: until the tasks are used up)")
    groups_per_step: int = flag(4, "groups that one optimizer step trains")
    max_tokens: int = flag(65536, "tokens per micro-batch")
    prefix_merging: Literal["off", "trajectory", "group"] = flag(
        "group", "off: every model call a row of its own; otherwise a tree per trajectory, or per group"
    )
    staleness_policy: Literal["drop", "decay", "mask"] = flag(
        "drop",
        "data with tokens older than --max_staleness: set aside; trained with an advantage that shrinks by"
        " exp(-out_of_date_decay) per optimizer step beyond it; or trained without those tokens",
    )
    advantage_whitening: Literal["none", "batch"] = flag(
        "none",
        "batch: advantages less their mean over the step's trained tokens, over their standard deviation"
        " (REINFORCE++)",
    )
    max_trained_count: int = flag(1, "how often one trajectory is trained")
    retrained_interval: int = flag(1, "steps between two trainings of one trajectory")
    save_steps: int = flag(10, "a resumable checkpoint every so many steps")
    save_total_limit: int = flag(2, "checkpoints kept")
    publish_steps: int = flag(1, "publish weights every so many steps")
    published_versions_kept: int = flag(4, "published weight folders kept on disk")
    keep_every: int = flag(
        0, "keep every N-th published version for ever, besides --published_versions_kept (0: none)"
    )
    publish_wait_seconds: float = flag(
        600.0,
        "how long training pauses when weights cannot be published and data would become too stale; then it"
        " saves and ends",
    )
    fallback_output_dir: str | None = flag(
        None, "folder on another disk for checkpoints that --output_dir has no space for"
    )
    max_bad_steps: int = flag(3, "steps in a row without a finite loss and gradient that end the training")
    resume_from_checkpoint: str | None = flag(
        "auto", "'auto' (the newest one whose steps have not been undone), a checkpoint folder, or 'none'"
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward")
    loss_seq_chunk_size: int | None = flag(None, "tokens per chunk of the logprob projection (default: 1024)")
    autocast_bf16: bool = flag(False, "float32 weights, bfloat16 matrix products")
    verify_data: bool = flag(
        True, "check training data against their Records and model calls before a step trains them"
    )
    data_wait_seconds: float = flag(3600.0, "give up when no step's worth of data comes for this long")
    report_to: str = flag(
        "none", "trackers, comma-separated: none, tensorboard, wandb, mlflow, or your own as module:name"
    )
    dp_replicate_size: int = flag(1, "copies of the model; each is sharded over the ranks that are left")
    tp_size: int = flag(1, "ranks that compute each layer between them (tensor parallelism)")
    pp_size: int = flag(1, "ranks that hold the layers one after the other (pipeline parallelism)")
    cp_size: int = flag(1, "ranks that share the tokens of each trajectory (context parallelism)")
    ep_size: int = flag(1, "ranks that hold the experts of a mixture between them (expert parallelism)")
    enable_sampling: bool = flag(
        True, "accepted from the original's scripts: sampling is a process of its own"
    )
    pad_to_multiple_of: int | None = flag(None, "accepted from the original's scripts: forests are packed")
    gradient_accumulation_steps: int = flag(1, "accepted from the original's scripts: see --groups_per_step")

    def __post_init__(self) -> None:
        require_positive(
            self, "groups_per_step", "max_tokens", "max_trained_count", "save_steps", "save_total_limit",
            "publish_steps", "published_versions_kept", "publish_wait_seconds", "loss_seq_chunk_size",
            "data_wait_seconds", "max_bad_steps",
            "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size",
        )  # fmt: skip
        require(
            self.published_versions_kept >= 2,
            f"--published_versions_kept is {self.published_versions_kept}",
            "keep at least 2: engines may still be loading the version before the newest",
        )
        require(self.keep_every >= 0, f"--keep_every is {self.keep_every}", "0 keeps no version for ever")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One inference engine."""

    engine: Literal["local", "sglang", "vllm"] = flag("local", "which engine `agentrl serve` runs")
    host: str = flag("127.0.0.1", "address the engine binds to")
    port: int = flag(0, "port of the engine (0: any free one)")
    inf_tp_size: int = flag(1, "tensor-parallel ranks of the engine")
    inf_mem_ratio: float = flag(0.5, "share of the device's memory for the engine")
    max_running_requests: int = flag(32, "sequences that the engine decodes at a time")
    max_total_tokens: int = flag(65536, "tokens of KV cache")
    heartbeat_seconds: float = flag(2.0, "an engine's heartbeat; it counts as dead after five missed ones")
    engine_start_seconds: float = flag(300.0, "how long an engine may take to start")
    engine_args: str = flag("", "further arguments for the SGLang or vLLM server, as one string")

    def __post_init__(self) -> None:
        require_positive(
            self, "inf_tp_size", "inf_mem_ratio", "max_running_requests", "max_total_tokens",
            "heartbeat_seconds", "engine_start_seconds",
        )  # fmt: skip

    @property
    def alive_seconds(self) -> float:
        """An engine whose last heartbeat is older than this is dead."""
        return _MISSED_HEARTBEATS * self.heartbeat_seconds


GROUPS: tuple[type, ...] = (
    RunConfig, ModelConfig, TaskConfig, ClaimConfig, AgentConfig, SamplingConfig, GroupConfig, LossConfig,
    OptimConfig, AdapterConfig, MemoryConfig, TrainConfig, EngineConfig,
)  # fmt: skip
"""All groups. A run has one set of flags: every process accepts all of them and reads those it needs."""
