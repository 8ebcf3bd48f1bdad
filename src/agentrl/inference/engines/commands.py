"""Build the command that starts the server of an engine, and run it as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from agentrl.base.device_lease import has_gpu
from agentrl.base.installation import clone, deploy_files, require
from agentrl.base.processes import start_child, stop_child, tail
from agentrl.config.run import CPU_RUNNING_REQUESTS, without_uri
from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.config.training import AdapterConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.inference.client import EngineClient, load_seconds
from agentrl.weights.folder import read_config, read_header, replayed_experts, stored_dtype, tensor_files

_SGLANG_LAYERS = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj",
     "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
)  # fmt: skip
"""The linear layers that SGLang 0.5.23 adapts (``--lora-target-modules``)."""
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``--max-lora-rank``."""


def why_merged(engine: str, folder: str, adapter: AdapterConfig) -> str | None:
    """Return why ``engine`` gets adapters merged into the weights of ``folder``; None if it loads them."""
    if adapter.lora_rank == 0 and engine != "local":
        return f"{engine} was started without --lora_rank, and the run had no trainer yet"
    config = read_config(Path(folder))
    if "vision_config" in config:
        return "the model reads images"
    if engine == "local":
        return None
    if any("expert" in key and value for key, value in config.items()):
        return f"{engine} adapts the experts of a mixture in other ways than the trainer"
    if engine == "vllm":
        if not has_gpu():
            return "vLLM's adapters need a GPU"
        return None if adapter.lora_rank <= _VLLM_RANKS[-1] else f"vLLM's ranks end at {_VLLM_RANKS[-1]}"
    unknown = sorted(_target_layers(folder, adapter) - _SGLANG_LAYERS)
    return f"SGLang adapts no layers named {', '.join(unknown)}" if unknown else None


def _lora_arguments(engine: str, folder: str, adapter: AdapterConfig) -> list[str]:
    """Return the arguments of a server of ``engine`` that loads the run's adapters by itself."""
    if engine == "local" or why_merged(engine, folder, adapter) is not None:
        return []
    if engine == "vllm":
        rank = next(rank for rank in _VLLM_RANKS if rank >= adapter.lora_rank)
        return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "4", "--max-cpu-loras", "8"]
    layers = sorted(_target_layers(folder, adapter))
    return [
        *("--enable-lora", "--max-lora-rank", str(adapter.lora_rank), "--lora-target-modules", *layers),
        *(() if has_gpu() else ("--lora-backend", "torch_native")),
    ]


def _target_layers(folder: str, adapter: AdapterConfig) -> set[str]:
    """Return the names of the layers that get an adapter; for all-linear those of the model's matrices."""
    targets = adapter.target_modules
    if isinstance(targets, list):
        return {name.rpartition(".")[2] for name in targets}
    headers: list[dict[str, Any]] = [read_header(file) for file in tensor_files(Path(folder))]
    names = (name for header in headers for name, entry in header.items() if len(entry["shape"]) == 2)
    return {name.split(".")[-2] for name in names if ".layers." in name and name.endswith(".weight")}


ENGINES = ("local", "sglang", "vllm")
_SGLANG_ENV = {"HF_HUB_OFFLINE": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
"""``SGLANG_RETURN_ORIGINAL_LOGPROB=0``: logprobs are those of logits / temperature."""
_VLLM_CPU_BLOCK = 32
"""Tokens per page of the KV cache on a CPU; only full pages are reused."""

SHARED_MEMORY = 0.5
"""Default fraction of a GPU's memory on GPUs that a trainer may use too."""
COLOCATED_MEMORY = 0.8
"""Default fraction with ``--colocate true``: CUDA contexts and graphs of both processes stay."""
_OWN_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_STREAM_INTERVAL = 16
"""Tokens per event of a stream: an engine that dies loses fewer than this."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The command that starts a server; ``env`` is added to the environment.

    ``instance`` is the name by which ``EngineClient.instance`` recognizes the server that this starts, and
    ``weights`` the folder that it loads.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    instance: str | None = None
    weights: str | None = None


def engine_command(
    folder: str, model: ModelConfig, config: EngineConfig, port: int, adapter: AdapterConfig | None = None
) -> EngineCommand:
    """Return the command that serves the model in ``folder``, and adapters of it, with ``config.engine``.

    The engine is told the dtype of the weights: left to itself, SGLang makes float16 of float32. On a CPU,
    SGLang and vLLM hold any weights in float32, which is exact. The local engine multiplies there in the
    trainer's dtype, unless ``--dtype float32`` is given. Each call chooses another random instance name.
    Raises ConfigError if the engine cannot run here, and ModelError for a folder that is not a model.
    """
    instance = secrets.token_hex(8)
    if config.engine == "local":
        return _local_command(folder, model, config, port=port, instance=instance)
    if config.inf_tp_size != 1 and not has_gpu():
        raise ConfigError(
            f"--inf_tp_size {config.inf_tp_size} needs GPUs, and there are none here", hint="set it to 1"
        )
    if config.rollout_quantization != "none" and not has_gpu():
        raise ConfigError(
            f"--rollout_quantization {config.rollout_quantization} needs a GPU with --engine {config.engine},"
            " and there is none here",
            hint="use --engine local, which rounds the weights as a GPU engine does",
        )
    command = _sglang_command if config.engine == "sglang" else _vllm_command
    built = command(folder, model, config, port=port, instance=instance)
    if adapter is None or adapter.lora_rank == 0:
        return built
    lora = _lora_arguments(config.engine, folder, adapter)
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if lora and config.engine == "vllm" else {}
    return replace(built, argv=[*built.argv, *lora], env={**built.env, **env})


def engine_venv(name: str) -> Path:
    """Return the venv of an engine: for vLLM, ``AGENTRL_VLLM_VENV``, or ``.venv-vllm``.

    That is a folder of the clone of the repository, or without a clone of the working folder.
    """
    return Path(os.environ.get(_venv_variable(name)) or (clone() or Path.cwd()) / f".venv-{name}")


def engine_python(name: str) -> str:
    """Return a Python interpreter that has the engine: that of its venv, or this one. Raises ConfigError."""
    python = engine_venv(name) / "bin" / "python"
    if python.is_file():
        return str(python)
    if not os.environ.get(_venv_variable(name)) and importlib.util.find_spec(name) is not None:
        return sys.executable
    raise ConfigError(f"{name} is not installed: there is no {python}", hint=install_hint(name))


def require_engine(name: str) -> None:
    """Raise ConfigError, which says how to install it, unless the engine ``name`` is installed."""
    if name == "local":
        require("torch", "--engine local")
    else:
        engine_python(name)


def install_hint(name: str) -> str:
    """Return the hint that says how to install an engine."""
    make = f"bash scripts/setup_{name}.sh"
    if clone() is None:
        make = f"python3 -m venv .venv-{name} && .venv-{name}/bin/pip install {name}"
    return f"{make}, or set {_venv_variable(name)} to a venv that has it"


def _local_command(
    model_path: str, model: ModelConfig, config: EngineConfig, *, port: int, instance: str
) -> EngineCommand:
    require("torch", "--engine local")
    stored = stored_dtype(Path(model_path))
    argv = [
        *(sys.executable, "-m", "agentrl.local.engine"),
        *("--model_path", model_path, "--host", config.host, "--port", str(port)),
        *("--dtype", stored if model.dtype == "float32" else "auto", "--instance", instance),
        *("--quantization", config.rollout_quantization),
        *("--max_running_requests", str(config.max_running_requests or CPU_RUNNING_REQUESTS)),
        *("--max_total_tokens", str(config.max_total_tokens)),
        *_limit("--max_model_len", model.max_model_len),
    ]
    env = {"OMP_NUM_THREADS": _omp_threads(), "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    return EngineCommand(argv, env, instance, model_path)


def _sglang_command(
    model_path: str, model: ModelConfig, config: EngineConfig, *, port: int, instance: str
) -> EngineCommand:
    """Return the command of SGLang's server; the served model's name ends with the instance.

    SGLang returns this name in ``/server_info``, so that a client can read the instance from it.
    """
    common = [
        *("--model-path", model_path),
        *("--host", config.host, "--port", str(port)),
        *_limit("--max-running-requests", _running_requests(config)),
        *_limit("--mem-fraction-static", _memory_fraction(config)),
        *("--log-level", "warning"),
        *_limit("--context-length", model.max_model_len),
        *("--incremental-streaming-output", "--stream-interval", str(_STREAM_INTERVAL)),
    ]
    if replayed_experts(model, model_path) is not None:
        common.append("--enable-return-routed-experts")
    python = engine_python("sglang")
    further = [*shlex.split(config.engine_args), "--served-model-name", f"{model.model_name}@{instance}"]
    if has_gpu():
        dtype = stored_dtype(Path(model_path))
        argv = [python, "-m", "sglang.launch_server", *common, "--tp-size", str(config.inf_tp_size)]
        argv += ["--dtype", dtype]
        if config.rollout_quantization == "fp8":  # flash_rl: loads new weights into the quantized ones
            argv += ["--quantization", "fp8", "--load-format", "flash_rl"]
        if dtype == "float32":  # FlashAttention and FlashInfer, its defaults, have no float32
            argv += ["--attention-backend", "triton"]
        if config.is_colocated:
            argv.append("--enable-memory-saver")
        return EngineCommand([*argv, *further], dict(_SGLANG_ENV), instance, model_path)
    cpu = [
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
        *("--max-total-tokens", str(config.max_total_tokens)),
        "--sleep-on-idle",  # else its scheduler polls, and takes a core from the trainer
    ]
    env = {
        **_SGLANG_ENV,
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": _omp_threads(),
        "TORCHDYNAMO_DISABLE": "1",
    }
    argv = [python, str(deploy_files() / "sglang" / "launch_cpu.py"), *cpu, *common, *further]
    return EngineCommand(argv, env, instance, model_path)


def _vllm_command(
    model_path: str, model: ModelConfig, config: EngineConfig, *, port: int, instance: str
) -> EngineCommand:
    """Return the command of vLLM's server; its second model name ends with the instance.

    Pausing and loading weights need vLLM's development mode, whose ``/collective_rpc`` calls any method of a
    worker: let only trusted machines reach the port.
    """
    argv = [
        *(engine_python("vllm"), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model_path),
        *("--host", config.host, "--port", str(port)),
        *_limit("--max-num-seqs", _running_requests(config)),
        *("--logprobs-mode", "processed_logprobs"),
        *("--enable-scale-out", "--enable-prompt-tokens-details"),
        *("--stream-interval", str(_STREAM_INTERVAL)),
        *_limit("--max-model-len", model.max_model_len),
        "--disable-uvicorn-access-log",
    ]
    env = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if has_gpu():
        argv += ["--tensor-parallel-size", str(config.inf_tp_size)]
        argv += ["--dtype", stored_dtype(Path(model_path))]
        argv += ["--quantization", "fp8"] if config.rollout_quantization == "fp8" else []
        argv += _limit("--gpu-memory-utilization", _memory_fraction(config))
        argv += ["--enable-sleep-mode"] if config.is_colocated else []
    else:
        worker = deploy_files() / "vllm" / "packing_worker.py"
        argv += ["--dtype", "float32", "--enforce-eager", "--block-size", str(_VLLM_CPU_BLOCK)]
        argv += ["--num-gpu-blocks-override", str(config.max_total_tokens // _VLLM_CPU_BLOCK)]
        argv += ["--worker-cls", f"{worker.stem}.PackingWorker"]
        env |= {
            "PYTHONPATH": str(worker.parent),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": _omp_threads(),
        }
    argv += [*shlex.split(config.engine_args), "--served-model-name", model.model_name]
    argv.append(f"{model.model_name}@{instance}")
    return EngineCommand(argv, env, instance, model_path)


def _running_requests(config: EngineConfig) -> int | None:
    """Return the limit for SGLang or vLLM; None lets it choose by its memory."""
    return config.max_running_requests or (None if has_gpu() else CPU_RUNNING_REQUESTS)


def _memory_fraction(config: EngineConfig) -> float | None:
    """Return the fraction of memory for SGLang or vLLM; None lets it take what it takes by itself."""
    has_own = has_gpu() and any(os.environ.get(name) for name in _OWN_GPUS)
    default = COLOCATED_MEMORY if config.is_colocated else None if has_own else SHARED_MEMORY
    return config.inf_mem_ratio or default


def _limit(flag: str, value: float | None) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _omp_threads() -> str:
    return os.environ.get("OMP_NUM_THREADS", "1")


def _venv_variable(name: str) -> str:
    return f"AGENTRL_{name.upper()}_VENV"


_POLL_SECONDS = 0.25
_MAX_PORT = 65535


class EngineProcess:
    """A running server and everything that it started: one process group, which ends with this process."""

    def __init__(self, command: EngineCommand, log_file: Path, pass_fds: Sequence[int] = ()) -> None:
        """Start it. Call this from the main thread: the server is killed when the calling thread ends.

        The file descriptors ``pass_fds`` stay open in it.
        """
        self.log_file = log_file
        self.instance = command.instance
        self._weights = command.weights
        self._child = start_child(
            command.argv, log=log_file, env={**without_uri(os.environ), **command.env}, is_guarded=True,
            pass_fds=pass_fds,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The id of the process group."""
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the server runs."""
        return self._child.poll()

    async def wait_ready(self, client: EngineClient, seconds: float) -> None:
        """Wait until the server is healthy.

        Raises EngineError if it ends first, if another server answers at its address, or after ``seconds``
        and the time that its weights may take to load.
        """
        seconds += await asyncio.to_thread(load_seconds, self._weights)
        deadline = time.monotonic() + seconds
        while True:
            healthy = await client.health()
            self._require_running(" while starting")
            if healthy:
                await client.check_instance(self.instance)
                return
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine was not ready after {seconds:.0f} s (--engine_start_seconds, and the time"
                    " that its weights take at 100 MB/s)",
                    hint=f"see {self.log_file}",
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self, seconds: float = 10.0) -> None:
        """Send SIGTERM to the process group, and SIGKILL to what is left of it after ``seconds``."""
        await asyncio.to_thread(stop_child, self._child, seconds)

    async def check(self, client: EngineClient) -> None:
        """Raise EngineError once the server has ended."""
        self._require_running()

    def _require_running(self, when: str = "") -> None:
        if self.returncode is not None:
            raise EngineError(
                f"the engine ended with exit code {self.returncode}{when}:\n{self.log_tail()}",
                hint=f"see {self.log_file}",
            )

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return tail(self.log_file)


def free_port(host: str) -> int:
    """Return a free port. Raises ConfigError if ``host`` is not an address of this machine."""
    return _bind(host, 0)


def require_free_port(host: str, port: int) -> None:
    """Raise ConfigError unless a server can listen on ``host:port`` now."""
    if not 1 <= port <= _MAX_PORT:
        raise ConfigError(f"--port is {port}", hint=f"use 1 to {_MAX_PORT}, or 0 for any free port")
    _bind(host, port)


def _bind(host: str, port: int) -> int:
    """Bind the address as servers do, release it, and return the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use{_listener(port)}",
                hint="end that process, or choose another --port (0: any free one)",
            ) from error
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"this user may not listen on port {port}", hint="choose a --port from 1024"
            ) from error
        raise ConfigError(
            f"--host {host} cannot be bound: {error.strerror or error}",
            hint="give an address of this machine, 127.0.0.1 or 0.0.0.0",
        ) from error


def _listener(port: int) -> str:
    """Return which process listens on ``port``, as far as the operating system shows it to this user."""
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections(kind="tcp"):
            listens = found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port
            if listens and found.pid is not None:
                return f" by process {found.pid} ({psutil.Process(found.pid).name()})"
    return " by another process"
