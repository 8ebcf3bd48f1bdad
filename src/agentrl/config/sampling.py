"""Flags of sampling: tasks, claims, samplers, agents and their tools, containers, teachers, evaluations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from agentrl.base.user_code import file_name
from agentrl.config.flags import Auto, Flags, flag, names_in, require, require_plain_url

_RESERVE = 1024
"""Default of ``--prompt_reserve_tokens``."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Flags):
    """One trajectory: its agent, turns and context."""

    section = "agent"

    agent_name: str = flag("react", "agent of tasks that name none")
    agent_cfg_path: str | None = flag(
        None,
        "YAML file with the configuration of the agent, of tasks that name none; for --agent_name command it"
        " describes the harness (docs/harnesses.md)",
        per_process=True,
    )
    system_prompt: str | None = flag(None, "system prompt of tasks that have none")
    query_prompt: str | None = flag(
        None, "template of the user message, with {query}, of tasks that have none"
    )
    max_turns: int = flag(16, "model calls per trajectory", within="[1, inf)", unit="model calls")
    max_prompt_tokens: int = flag(
        32768,
        "longest prompt; a longer context is reset or ends the trajectory",
        within="[1, inf)",
        unit="tokens",
    )
    prompt_reserve_tokens: int = flag(
        _RESERVE,
        "the context counts as full at --max_prompt_tokens minus this; an eighth of --max_prompt_tokens if"
        f" that is {_RESERVE} or less",
        within="[0, inf)",
        unit="tokens",
    )
    new_context: str = flag(
        "disabled",
        "context manager, called when the context is full: disabled (ends the trajectory), discard_all_tools"
        " (drops tool results), discard_all (starts from a summary), summarize (a summary and the latest tool"
        " calls), or your own as module:name",
    )
    repetition_early_stop_times: int = flag(
        -1,
        "end the trajectory after this many equal assistant messages (-1: never)",
        within="[-1, inf)",
        unit="messages",
    )
    enable_repetition_compress: bool = flag(
        False, "on repetition, reset the context instead of ending the trajectory"
    )
    tool_call_parser: str | None = flag(
        None,
        "how tool calls are written: hermes, qwen3_coder, llama, … (docs/tool_calls.md), or your own as"
        " module:name (default: as the chat format or the marks in the chat template say)",
    )
    trajectory_timeout_seconds: float = flag(
        3600.0, "timeout of one trajectory", within="(0, inf)", unit="seconds"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_reserve_tokens == _RESERVE >= self.max_prompt_tokens:
            object.__setattr__(self, "prompt_reserve_tokens", self.max_prompt_tokens // 8)
        require(
            self.max_prompt_tokens > self.prompt_reserve_tokens,
            f"--max_prompt_tokens {self.max_prompt_tokens} leaves nothing beside"
            f" --prompt_reserve_tokens {self.prompt_reserve_tokens}",
            "raise --max_prompt_tokens or lower --prompt_reserve_tokens",
        )


@dataclass(frozen=True, kw_only=True)
class ToolConfig(Flags):
    """The tools that a model may call, and their limits."""

    section = "tools"

    tools: str = flag(
        "", "Python tools, comma-separated: module:name of functions or classes, or registered names"
    )
    tool_config_path: str | None = flag(
        None, "verl's tool configuration, YAML: classes of tools with their settings and schemas"
    )
    mcp_manager_url: str | None = flag(None, "URL of an MCP manager (…/mcpapi) or a streamable-HTTP server")
    mcp_server_name: str = flag("all", "server to use behind --mcp_manager_url")
    mcp_servers_file: str | None = flag(
        None, "MCP servers by name (command or url): YAML, or the mcpServers JSON of other clients"
    )
    mcp_auth_token_env: str = flag("MCP_AUTH_TOKEN", "environment variable with the MCP bearer token")
    tool_timeout_seconds: float = flag(
        60.0,
        "timeout of one tool call; each progress message of the tool restarts it",
        within="(0, inf)",
        unit="seconds",
    )
    max_tool_result_chars: int = flag(
        32768, "a longer tool result is cut, with a notice to the model", within="[1, inf)", unit="characters"
    )
    max_parallel_tool_calls: int = flag(
        8, "tool calls of one turn that run at a time", within="[1, inf)", unit="calls"
    )
    max_tool_connections: int = flag(
        256,
        "calls in flight at one tool server, and connections of an HTTP pool; further calls wait",
        within="[1, inf)",
        unit="calls",
        per_process=True,
    )

    @property
    def any_named(self) -> bool:
        """Return whether a flag names tools."""
        return bool(self.tools or self.tool_config_path or self.mcp_manager_url or self.mcp_servers_file)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(Flags):
    """Gateways: model APIs in front of rollouts."""

    section = "gateway"
    is_per_process = True

    gateway_host: str = flag("127.0.0.1", "address that a gateway listens on")
    gateway_port: int = flag(
        8790,
        "port of `agentrl gateway` (0: a free one); a gateway inside `agentrl sample` takes a free one",
        within="[0, 65535]",
    )
    gateway_allowed_hosts: str = flag(
        "",
        "names, comma-separated, besides localhost and IP addresses, by which clients and web pages may ask a"
        " gateway that listens on a loopback address",
    )
    gateway_url: str | None = flag(
        None,
        "URL of an `agentrl gateway` that serves this sampler's trajectories (default: one inside the"
        " sampler)",
    )
    gateway_models: str = flag(
        "policy",
        "names, comma-separated, by which a client may name the policy; claude-* allows all that begin so",
    )
    gateway_train: Literal["tasks", "feedback"] = flag(
        "tasks",
        "what `agentrl gateway` serves: trajectories of tasks, or also conversations that a product opens,"
        " which are trained by their feedback (docs/gateway.md)",
    )
    gateway_key_env: str = flag(
        "AGENTRL_GATEWAY_KEY",
        "environment variable with the bearer token for opening conversations and giving feedback; needed if"
        " --gateway_host is not this machine alone",
    )
    gateway_idle_minutes: float = flag(
        30.0, "a conversation without a request for this long has ended", within="(0, inf)", unit="minutes"
    )
    gateway_body_mb: float = flag(8.0, "largest body of a request", within="(0, inf)", unit="MiB")
    gateway_timeout_seconds: float = flag(
        60.0, "time for the body of a request to arrive", within="(0, inf)", unit="seconds"
    )
    gateway_retry_seconds: float = flag(
        10.0,
        "a request with the body of one that ended this long ago or less is its retry and gets its answer",
        within="[0, inf)",
        unit="seconds",
    )

    @property
    def idle_seconds(self) -> float:
        """``--gateway_idle_minutes`` in seconds."""
        return 60 * self.gateway_idle_minutes

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names and patterns of the policy; the first one is a name."""
        given = names_in(self.gateway_models)
        names = [name for name in given if not is_pattern(name)] or ["policy"]
        return (*names, *filter(is_pattern, given))


def is_pattern(name: str) -> bool:
    """Return whether a name of the policy stands for several, as ``claude-*`` does."""
    return any(letter in name for letter in "*?[")


@dataclass(frozen=True, kw_only=True)
class ContainerConfig(Flags):
    """The containers of tasks that have an image of their own."""

    section = "containers"
    is_per_process = True

    containers: str = flag(
        "auto",
        "what runs the containers of tasks: docker, kubernetes, sandbox (root file systems of --rootfs), or"
        " your own (auto: sandbox for the images that --rootfs names, docker for the others)",
    )
    rootfs: str = flag(
        "",
        "root file systems for the sandbox, comma-separated: PATH of a folder or tar for every image, or"
        " NAME=PATH for the image NAME, or for the built image of the task NAME",
    )
    task_variables: str = flag(
        "", "variables of this process, comma-separated, that a task's environment may read as ${NAME}"
    )

    task_network: str | None = flag(
        None,
        "network of tasks that ask for one (network_mode public, as without it): none, host, which reaches"
        " the services of this machine too, or one that the back end knows; by default Docker's bridge, and"
        " the sandbox, which has no other than the host's, refuses these tasks",
    )

    snapshot_mb: int = flag(
        256,
        "largest archive of what a trajectory has changed in its container; it is kept after each turn, and"
        " another sampler goes on from there (0: keep none, and run the commands again)",
        within="[0, inf)",
        unit="MiB",
    )
    snapshots_to: str | None = flag(
        None,
        "folder, s3:// or gs:// URL of these archives, each run's in a subfolder of its name; the same for"
        " all samplers of a run (default: snapshots in --output_dir)",
    )

    @cached_property
    def roots(self) -> Mapping[str, str]:
        """``--rootfs`` as {name: path}; the name of one for every image is empty."""
        named = [part.rpartition("=") for part in names_in(self.rootfs)]
        return {name: os.path.abspath(os.path.expanduser(path)) for name, _, path in named}

    @property
    def variables(self) -> Mapping[str, str]:
        """The values of ``--task_variables`` that are set."""
        return {name: os.environ[name] for name in names_in(self.task_variables) if name in os.environ}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, path in self.roots.items():
            require(
                os.path.exists(path),
                f"--rootfs {name + '=' if name else ''}{path} does not exist",
                "give a folder, or a tar as `docker export CONTAINER > FILE.tar` writes it",
            )


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Flags):
    """The teacher of on-policy distillation, and what it reads."""

    section = "teacher"

    teacher: str | None = flag(
        None,
        "the teacher: a model folder, or the URL of an SGLang or vLLM server; `agentrl launch` then starts"
        " `agentrl teach`",
        per_process=True,
    )
    teacher_name: str = flag(
        "", "fill for tasks with this meta.teacher, and for those that name no teacher", per_process=True
    )
    teacher_tokenizer: str | None = flag(
        None,
        "folder with the teacher's tokenizer (default: that of the model, if its folder is here)",
        per_process=True,
    )
    teacher_prompt: str | None = flag(
        None,
        "file with a prompt that the teacher alone reads, at the end of the system message: {answer} and"
        " {query} are the task's",
        per_process=True,
    )
    teacher_top_logprobs: int = flag(
        16,
        "most likely ids to store beside each token's logprob, for the reverse KL over them (0: only the"
        " sampled token's logprob)",
        within="[0, 1000]",
        unit="ids",
    )
    teacher_concurrency: int = flag(8, "trajectories asked about at a time", within="[1, inf)")
    teacher_timeout_seconds: float = flag(
        300.0, "time limit of a request to a server", within="(0, inf)", unit="seconds"
    )
    teacher_wait_seconds: float = flag(
        600.0, "longest wait for a server at the start", within="[0, inf)", unit="seconds"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher is not None and "://" in self.teacher:
            require_plain_url("teacher", self.teacher)


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Flags):
    """The tasks, their epochs and the size of a group."""

    section = "tasks"

    train_file: str | None = flag(
        None,
        "training tasks: a JSONL, JSON, Parquet, CSV or Arrow file, FOLDER[:SPLIT], hf://ORG/NAME[:SPLIT],"
        " env:NAME?n=…&seed=…, or a YAML file that mixes several of them (docs/tasks.md#mixtures)",
        per_process=True,
    )
    eval_file: str | None = flag(
        None, "evaluation tasks, from the same sources as --train_file, but no mixture", per_process=True
    )
    task_fields: str = flag(
        "",
        "where the rows have a task's fields, comma-separated: query=COLUMN,answer=COLUMN, or a value for"
        " every row: scorer:=math",
        per_process=True,
    )
    task_preset: Literal[
        "auto",
        "none",
        "original",
        "chatlearn",
        "verl",
        "choices",
        "conversations",
        "trl",
        "gsm8k",
        "math",
        "messages",
    ] = flag(
        "auto", "the system whose rows the files have; auto knows it by a row's fields", per_process=True
    )
    num_train_epochs: int = flag(
        1, "passes over the training tasks; of a mixture, over each source", within="[1, inf)", unit="epochs"
    )
    num_generations: int = flag(
        8, "trajectories per task: the size of a group", within="[1, inf)", unit="trajectories"
    )
    skip_bad_lines: bool = flag(
        False, "skip invalid lines of a task file and load the others", per_process=True
    )
    shuffle_tasks: bool = flag(True, "shuffle the tasks of each epoch by --seed")
    task_selection: Literal["order", "pass_rate", "curriculum"] = flag(
        "order",
        "which task is sampled next: the next one of the epoch, or, with pass_rate, also the copy in a later"
        " epoch of a task whose pass rate is near 1/2; with curriculum, the next one of the lowest meta.level"
        " that is not mastered",
    )
    import_modules: str = flag(
        "",
        "modules of your own, comma-separated, that are imported first: what they register, by @agent,"
        " @scorer and so on, has a name that tasks may use",
        per_process=True,
    )
    allowed_modules: str = flag(
        "",
        "modules or packages, comma-separated, whose functions tasks may name as module:function; functions"
        " named in --train_file, --eval_file or a loaded task file are always allowed",
    )
    allowed_hosts: str = flag(
        "",
        "servers, comma-separated HOST or HOST:PORT, that environments of tasks may reach; those named in a"
        " task file as above are always allowed",
        per_process=True,
    )
    allowed_folders: str = flag(
        "",
        "folders, comma-separated, below which tasks may name files: Harbor's tasks, agents' files; those"
        " named in a task file as above are always allowed",
        per_process=True,
    )

    @property
    def allowed_names(self) -> frozenset[str]:
        """What these flags allow tasks to name: see ``permissions``."""
        hosts = (f"//{host}" for host in names_in(self.allowed_hosts))
        folders = (file_name(os.path.expanduser(path)) for path in names_in(self.allowed_folders))
        modules = (*names_in(self.allowed_modules), *self.imported_modules)
        return frozenset([*modules, *hosts, *folders])

    @property
    def imported_modules(self) -> tuple[str, ...]:
        """``--import_modules`` as a tuple."""
        return tuple(names_in(self.import_modules))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.task_selection != "pass_rate" or self.num_train_epochs > 1,
            f"--task_selection is {self.task_selection}, and --num_train_epochs 1 lets no task be sampled"
            " twice",
            "raise --num_train_epochs: it bounds how often one task may be sampled",
        )


@dataclass(frozen=True, kw_only=True)
class ClaimConfig(Flags):
    """Leases and retries of sampling claims."""

    section = "claims"

    lease_seconds: float = flag(
        60.0,
        "how long a sampler's claim or the trainer's lease is valid without renewal",
        within="(0, inf)",
        unit="seconds",
    )
    max_attempts: int = flag(
        3, "attempts at a trajectory before its slot fails for good", within="[1, inf)", unit="attempts"
    )
    max_scorings: int = flag(
        5,
        "attempts to score a sampled trajectory before its slot fails for good; outages do not count",
        within="[1, inf)",
        unit="attempts",
    )
    retry_backoff_seconds: float = flag(
        2.0,
        "delay before the second attempt to sample or to score; doubles with each further one",
        within="(0, inf)",
        unit="seconds",
    )
    # Not more: with the 15 s to cancel, release and finalize it fits 30 s, the grace of Kubernetes and Slurm.
    drain_seconds: float = flag(
        10.0,
        "how long model calls, tool calls and scorings that run may go on after SIGTERM or `agentrl samplers"
        " drain`; a second signal ends them at once",
        within="[0, inf)",
        unit="seconds",
        per_process=True,
    )

    @property
    def heartbeat_seconds(self) -> float:
        """Interval at which a claim is renewed: three attempts within a lease."""
        return self.lease_seconds / 3


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Flags):
    """Samplers: model calls, concurrency and staleness."""

    section = "sampling"

    max_new_tokens: int = flag(8196, "tokens generated per model call", within="[1, inf)", unit="tokens")
    preferred_sampling_params: str = flag(
        "{}", 'JSON of sampling parameters, e.g. \'{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}\''
    )
    presence_penalty: float | None = flag(
        None, "presence_penalty of --preferred_sampling_params", within="[-2, 2]"
    )
    frequency_penalty: float | None = flag(
        None, "frequency_penalty of --preferred_sampling_params", within="[-2, 2]"
    )
    max_concurrent_samples_per_process: int = flag(
        16,
        "trajectories that one sampler runs at a time; with --target_concurrency auto, at the start",
        within="[1, inf)",
        unit="trajectories",
        per_process=True,
    )
    target_concurrency: int | Auto = flag(  # noqa: RUF009
        1,
        "sampler workers that `agentrl sample` starts in its process: each runs"
        " --max_concurrent_samples_per_process trajectories; auto: it finds how many trajectories at a time"
        " keep its engines at their most tokens/s, by their metrics (docs/throughput.md)",
        within="[1, inf)",
        unit="workers",
        per_process=True,
    )
    max_staleness: int = flag(
        1,
        "steps that sampling runs ahead of training, by a limit on open groups (0: fully on-policy);"
        " --staleness_policy decides about tokens that become older than it",
        within="[0, inf)",
        unit="optimizer steps",
    )
    sync_sampling: bool = flag(
        False, "sample the groups of a step only after the previous step has been published"
    )
    oversample_groups: int = flag(
        0,
        "groups sampled beyond those that the steps need: a step trains the first that are ready and does not"
        " wait for the slowest",
        within="[0, inf)",
        unit="groups",
    )
    tail_policy: Literal["carry", "cut"] = flag(
        "carry",
        "trajectories that still run when the steps that they were sampled for are trained: carry (they go on"
        " with newer weights) or cut (they end, and their groups keep the scored ones)",
    )
    engine_timeout_seconds: float = flag(
        120.0,
        "longest time without a token of a model call; it then continues from its tokens on another engine",
        within="(0, inf)",
        unit="seconds",
        per_process=True,
    )
    engine_wait_seconds: float = flag(
        300.0,
        "how long a model call goes without a token, over all engines, before the engines count as down",
        within="(0, inf)",
        unit="seconds",
        per_process=True,
    )
    outage_wait_seconds: float = flag(
        3600.0,
        "how long a trajectory waits for a tool server or the engines to come back before its slot is"
        " released, and a sampler that can claim nothing for a tool server at its start; no attempt is used",
        within="(0, inf)",
        unit="seconds",
        per_process=True,
    )
    max_concurrent_scorings: int = flag(
        16,
        "queued trajectories that one process scores at a time",
        within="[1, inf)",
        unit="trajectories",
        per_process=True,
    )
    scorer_timeout_seconds: float = flag(
        120.0, "timeout of one call of a scorer", within="(0, inf)", unit="seconds"
    )
    watch_answers: str = flag(
        "auto",
        "tool results that are searched for the task's answer, for a finding of status and dashboard: auto"
        " (for the answer and the question: a copy of the data set), none, or the names of tools,"
        " comma-separated, that should not know it (docs/tools.md)",
        per_process=True,
    )
    judge_gold: str | None = flag(
        None,
        "JSONL file of up to 200 answers with the score that people gave; one sampler or scorer has them"
        " judged again every --judge_gold_every steps, and a change is a finding (docs/scoring.md)",
        per_process=True,
    )
    judge_gold_every: int = flag(
        50, "steps between two judgings of --judge_gold", within="[1, inf)", unit="steps", per_process=True
    )
    feedback_hours: float = flag(
        72.0,
        "how long a trajectory with the scorer feedback waits for it after it was sampled; without any it"
        " fails and is not trained",
        within="(0, inf)",
        unit="hours",
        per_process=True,
    )
    idle_exit_seconds: float | None = flag(
        None,
        "exit after this long without work (default: never)",
        within="(0, inf)",
        unit="seconds",
        per_process=True,
    )
    max_cost: float | None = flag(
        None,
        "what the run may cost, in the currency of --prices: a sampler that finds more spent releases its"
        " work and ends with exit code 5 (default: no limit)",
        within="(0, inf)",
        per_process=True,
    )
    agent_config_path: str = flag(
        "assets/agent_config.yml",
        "YAML file with the endpoints of the judge and the browse agent",
        per_process=True,
    )
    resample_error_records: bool = flag(
        False,
        "reopen failed slots when the sampler starts, but for those that failed as `poison` or `replay`",
        per_process=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.engine_timeout_seconds < self.engine_wait_seconds,
            f"--engine_timeout_seconds {self.engine_timeout_seconds:g} leaves a silent engine no successor"
            f" within --engine_wait_seconds {self.engine_wait_seconds:g}",
            "make the time-out between tokens shorter than the wait for engines",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Flags):
    """The policy that `agentrl eval` evaluates, and its engine."""

    section = "evaluation"
    is_per_process = True

    eval_version: int | None = flag(
        None,
        "policy version to evaluate (default: the newest that an engine serves, else the newest published)",
        within="[0, inf)",
    )
    eval_model: str | None = flag(None, "model folder or checkpoint to evaluate instead of a policy version")
    eval_label: str = flag("", "label of a repetition: samples the same file and policy again")
    eval_samples: int | None = flag(
        None,
        "trajectories per task of an evaluation (default: --num_generations if it is given, else 1)",
        within="[1, inf)",
        unit="trajectories",
    )
    eval_steps: int | None = flag(
        None,
        "follow the run: evaluate each published version whose step is a multiple of this",
        within="[1, inf)",
        unit="optimizer steps",
    )
    eval_engine: Literal["auto", "own", "shared"] = flag(
        "auto",
        "engine of an evaluation: shared (live engines of the run that serve the version), own (started for"
        " the evaluation by the flags of `agentrl serve`), or auto (shared if there is one, else own)",
    )
    eval_input_price: float = flag(
        0.0, "price of a million prompt tokens, for the cost in reports", within="[0, inf)"
    )
    eval_output_price: float = flag(
        0.0, "price of a million generated tokens, for the cost in reports", within="[0, inf)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.eval_version is None or self.eval_model is None,
            f"--eval_version {self.eval_version} and --eval_model {self.eval_model} name two policies",
            "give one of them; `agentrl eval compare` compares two evaluations",
        )
        require(
            self.eval_steps is None or (self.eval_version is None and self.eval_model is None),
            f"--eval_steps {self.eval_steps} evaluates the versions of a run, not one policy",
            "leave out --eval_version and --eval_model",
        )
        require(
            self.eval_engine != "shared" or (self.eval_steps is None and self.eval_model is None),
            "--eval_engine is shared, and the run's engines serve only the newest version of the run",
            "use --eval_engine own with --eval_steps and --eval_model",
        )
        require(
            all(character.isalnum() or character in "_.-" for character in self.eval_label),
            f"--eval_label is {self.eval_label!r}",
            "use letters, digits, '_', '.' and '-'",
        )
