"""Flags of a run: its name, database, model, inference engine and traces; and what one machine runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.config.flags import Flags, flag, require, require_plain_url
from agentrl.errors import ConfigError

SYSTEM_DATABASES = frozenset({"admin", "config", "local"})
URI_VARIABLES = ("MONGO_URI", "MONGO_URI_FILE")
"""Environment variables with the URI of the database, or with the path of a file that holds it."""

DATABASE_FLAGS = ("db_connection_string", "mongo_dir", "db_timeout_seconds")
"""The flags that name a server, for commands that take no other flags of a run."""

CPU_RUNNING_REQUESTS = 32
"""Sequences that an engine on a CPU decodes at a time by default."""
_MISSED_HEARTBEATS = 5


@dataclass(frozen=True, kw_only=True)
class RunConfig(Flags):
    """The run: its name, folders and database."""

    section = "run"

    run_name: str = flag("default", "name of the run; its database has the same name")
    recipe: str | None = flag(
        None,
        "flags of a paper, of another system or of the original: a name that `agentrl recipes` lists, or a"
        " YAML file; what is given otherwise wins over them",
        per_process=True,
    )
    output_dir: str | None = flag(
        None, "folder of checkpoints and published weights (default: output/RUN_NAME)"
    )
    log_dir: str = flag("logs", "folder of the log files, one per process", per_process=True)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = flag(
        "INFO", "lowest level that is logged", per_process=True
    )
    verbose: bool = flag(
        False,
        "print every log record on stderr, as the log file has it; -v for short (default: those about single"
        " trajectories and groups as a summary a minute)",
        per_process=True,
    )
    seed: int = flag(0, "seed of task order, sampling and training", within="[0, 4294967295]")
    prices: str | None = flag(
        None,
        "YAML or JSON file with the prices of GPUs, tools and models, for the costs that status, audit and"
        " dashboard show and that --max_cost limits (docs/operations.md)",
        per_process=True,
    )
    db_connection_string: str | None = flag(
        None,
        "URI of a MongoDB replica set, 6.0 or newer (default: $MONGO_URI, or what the file $MONGO_URI_FILE"
        " holds, or the embedded server in --mongo_dir)",
        secret=True,
    )
    mongo_dir: str = flag(".agentrl/mongo", "folder of the embedded MongoDB", per_process=True)
    db_timeout_seconds: float = flag(
        10.0, "timeout of one database operation", within="(0, inf)", unit="seconds", per_process=True
    )
    db_wait_seconds: float = flag(
        90.0,
        "how long a process waits for a database that does not answer before it exits (0: not at all; inf:"
        " without limit)",
        within="[0, inf]",
        unit="seconds",
        per_process=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}", self.run_name)),
            f"--run_name is {self.run_name!r}",
            "use up to 48 letters, digits, '_' and '-': it names the database and the folders",
        )
        require(
            # Ignore case: MongoDB refuses a name that differs from another's in case alone.
            self.run_name.lower() not in SYSTEM_DATABASES,
            f"--run_name is {self.run_name!r}, the name of one of MongoDB's own databases",
            "choose another name: the run's database is named after it",
        )
        if self.db_connection_string is None:
            # Read it here: as the flag's default the URI, with its password, would be in every --help.
            object.__setattr__(self, "db_connection_string", uri_of_variables(os.environ))

    @property
    def output(self) -> str:
        """The run's output folder."""
        return self.output_dir or f"output/{self.run_name}"

    def checkpoint_roots(self, fallback: str | None) -> list[Path]:
        """Return the folders of checkpoints; ``fallback`` is the trainer's ``--fallback_output_dir``."""
        # Add the run's name to the fallback alone: runs may share it, and an --output_dir belongs to one.
        return [Path(self.output), *([Path(fallback) / self.run_name] if fallback else [])]


def uri_of_variables(variables: Mapping[str, str]) -> str | None:
    """Return the URI in MONGO_URI or in the file MONGO_URI_FILE; None if neither variable is set.

    An empty variable counts as not set. Raises ConfigError if both are set, or for a file without a URI.
    """
    uri, file = (variables.get(name) for name in URI_VARIABLES)
    require(not (uri and file), "MONGO_URI and MONGO_URI_FILE are both set", "unset one of them")
    if not file:
        return uri or None
    hint = "write the URI of the database, and nothing else, into a file that this user can read"
    try:
        # Strip it: an editor ends the file with a line break, which is no part of the URI.
        found = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"MONGO_URI_FILE is {file}, which cannot be read: {error.strerror}", hint=hint
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"MONGO_URI_FILE is {file}, which is not UTF-8 text", hint=hint) from error
    require(bool(found), f"MONGO_URI_FILE is {file}, which is empty", hint)
    return found


def without_uri(variables: Mapping[str, str]) -> dict[str, str]:
    """Return ``variables`` for a child process that does not use the database."""
    return {name: value for name, value in variables.items() if name not in URI_VARIABLES}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Flags):
    """The policy's model."""

    section = "model"

    model_name_or_path: str | None = flag(None, "Hugging Face folder of the model that the run starts from")
    model_name: str = flag("train-model", "name under which engines serve the policy")
    reference_model: str | None = flag(
        None,
        "Hugging Face folder of the reference model of --kl_coef, DPO, KTO (default: --model_name_or_path)",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto",
        "dtype of trained weights, gradients and the optimizer's moments; auto: float32. Published weights"
        " have the model's own dtype",
    )
    router_replay: Literal["auto", "on", "off"] = flag(
        "auto",
        "train the tokens of a mixture of experts through the experts that the engine chose for them"
        " (arXiv 2510.11370); auto: where the policy is a mixture",
    )
    trust_remote_code: bool = flag(False, "run Python code that comes with the model")
    chat_template: str | None = flag(None, "file of a chat template that replaces the model's own")
    max_model_len: int | None = flag(
        None,
        "longest context, a prompt and its continuation (default: what the model's configuration and the"
        " engine allow)",
        within="[2, inf)",
        unit="tokens",
    )
    chat_format: str = flag(
        "auto",
        "how messages become token ids: auto (the renderer whose ids are those of the model's template, else"
        " the template), template, or a renderer by name, e.g. qwen3; docs/chat_formats.md lists them",
    )
    chat_template_kwargs: str = flag(
        "{}", "JSON of arguments for the chat template, e.g. '{\"enable_thinking\": false}'"
    )
    thinking_retention: Literal["template", "all", "tool_cycle"] = flag(
        "template",
        "which earlier thoughts stay in the context: as the template keeps them, all, or those since the last"
        " user message (tool_cycle); where they are dropped, the next prompt is a new branch",
    )


@dataclass(frozen=True, kw_only=True)
class EngineListConfig(Flags):
    """How samplers find engines: by their heartbeats in the database, or through a router."""

    section = "engines"

    router_url: str | None = flag(
        None,
        "URL of an sglang-router: engines register there, and samplers send it all model calls (default: each"
        " sampler chooses among the live engines itself)",
        per_process=True,
    )
    heartbeat_seconds: float = flag(
        2.0,
        "interval of an engine's heartbeat; after five missed ones it counts as dead",
        within="(0, inf)",
        unit="seconds",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_plain_url("router_url", self.router_url)

    @property
    def alive_seconds(self) -> float:
        """Age of the last heartbeat above which an engine counts as dead."""
        return _MISSED_HEARTBEATS * self.heartbeat_seconds


@dataclass(frozen=True, kw_only=True)
class DeviceConfig(Flags):
    """Whether an engine and the trainer have a device together."""

    section = "device"

    colocate: Literal["auto", "true", "false"] = flag(
        "auto",
        "the engine and the trainer take turns on one device: the engine gives its memory back while a step"
        " is trained, and the trainer while it waits for data; auto: true under `agentrl launch` for an"
        " engine on a GPU of the trainer. Both need it, on one machine and with the same GPUs",
        per_process=True,
    )

    @property
    def is_colocated(self) -> bool:
        """Whether this process takes turns."""
        return self.colocate == "true"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineListConfig, DeviceConfig):
    """One inference engine."""

    section = "inference"

    engine: Literal["local", "sglang", "vllm"] = flag("local", "engine that `agentrl serve` runs")
    engine_url: str | None = flag(
        None,
        "URL of a running engine: `agentrl serve` loads its run's adapters there and starts no engine, and"
        " `agentrl try` sends its calls there (default: an engine of its own; for `agentrl try`, a live one"
        " of the run first)",
        per_process=True,
    )
    rollout_quantization: Literal["none", "fp8"] = flag(
        "none",
        "weights that engines sample with: as published (none), or rounded to fp8 when they are loaded, on a"
        " GPU or by the local engine; the trainer's stay in their dtype",
    )
    host: str = flag("127.0.0.1", "address that the engine binds to", per_process=True)
    port: int = flag(0, "port of the engine (0: any free one)", within="[0, 65535]", per_process=True)
    inf_tp_size: int = flag(
        1, "tensor-parallel ranks of the engine", within="[1, inf)", unit="ranks", per_process=True
    )
    inf_mem_ratio: float | None = flag(
        None,
        "fraction of a GPU's memory for SGLang or vLLM (default: 0.5, which leaves room for a trainer; 0.8"
        " with --colocate true; what the engine takes by itself where CUDA_VISIBLE_DEVICES gives it GPUs of"
        " its own)",
        within="(0, 1]",
        per_process=True,
    )
    max_running_requests: int | None = flag(
        None,
        "sequences that the engine decodes at a time (default: what SGLang or vLLM chooses on a GPU, else"
        f" {CPU_RUNNING_REQUESTS})",
        within="[1, inf)",
        unit="sequences",
        per_process=True,
    )
    max_total_tokens: int = flag(
        65536,
        "size of the KV cache of the local engine, and of SGLang and vLLM on a CPU; on a GPU, --inf_mem_ratio"
        " decides theirs",
        within="[1, inf)",
        unit="tokens",
        per_process=True,
    )
    engine_start_seconds: float = flag(
        300.0,
        "how long an engine may take to start, besides loading its weights at 100 MB/s",
        within="(0, inf)",
        unit="seconds",
        per_process=True,
    )
    weights_dir: str | None = flag(
        None,
        "folder for the host's copy of weights that are published as deltas or to a URL: all engines of the"
        " host share it, in a subfolder of the run's name; /dev/shm keeps it in memory (default:"
        " .agentrl/weights)",
        per_process=True,
    )
    engine_args: str = flag(
        "", "further arguments of the SGLang or vLLM server, as one string", per_process=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_plain_url("engine_url", self.engine_url)


@dataclass(frozen=True, kw_only=True)
class TraceConfig(Flags):
    """OpenTelemetry traces."""

    section = "tracing"
    is_per_process = True

    trace: str | None = flag(
        None,
        "where spans go: otlp://HOST:PORT (OTLP over gRPC; otlps:// with TLS), http://HOST:PORT or https://"
        " (OTLP over HTTP), mlflow (the server of MLFLOW_TRACKING_URI), mlflow://HOST:PORT/EXPERIMENT or"
        " sqlite:///FILE (MLflow without a server; default: nowhere)",
    )
    trace_content: bool = flag(
        False, "record messages, arguments, results and error messages in spans, redacted and cut"
    )
    trace_queue: int = flag(
        4096, "spans that wait to be sent; further ones are dropped", within="[1, inf)", unit="spans"
    )


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(Flags):
    """What `agentrl launch` starts on this machine, and on which GPUs."""

    section = "placement"
    is_per_process = True

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
    evaluate: bool = flag(True, "sample held-out tasks with the first and the last version")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run_name is not None:
            RunConfig(run_name=self.run_name)
