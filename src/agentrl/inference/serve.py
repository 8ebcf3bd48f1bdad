"""Serve one engine: start it or find it, with the newest policy version, and keep it until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentrl.base.device_lease import DeviceLease, has_gpu, leased_devices
from agentrl.config.load import Configs
from agentrl.config.schema import AdapterConfig, EngineConfig, ModelConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.inference.engines.clients import AttachedEngine, engine_client
from agentrl.inference.engines.commands import (
    EngineProcess,
    engine_command,
    free_port,
    require_free_port,
    why_merged,
)
from agentrl.inference.served_engine import ServedAdapters, ServedEngine, ServedWeights, starting_weights
from agentrl.store.mechanics.retry import retry_outages
from agentrl.weights.local_copy import LocalCopy, weights_dir

if TYPE_CHECKING:
    from agentrl.store.client import Store


_UPDATE_SECONDS = 600.0


async def serve(configs: Configs) -> None:
    """Serve the newest policy version, and each newer one, until SIGTERM or SIGINT.

    Raises EngineError if the engine ends by itself.
    """
    from agentrl.store.client import open_store, run_exists

    run, model, config = configs[RunConfig], configs[ModelConfig], configs[EngineConfig]
    is_own = config.engine_url is None
    if not is_own and (config.router_url is not None or config.is_colocated):
        raise ConfigError(
            "--engine_url names an engine of another process, which alone registers it at a --router_url and"
            " lends its device",
            hint="leave --router_url and co-location out",
        )
    if config.port and is_own:
        require_free_port(config.host, config.port)
    with retry_outages(run.db_wait_seconds):
        # A bad folder or engine begins no run. A run that has begun may have weights of its own.
        if is_own and model.model_name_or_path is not None and not await run_exists(run):
            engine_command(model.model_name_or_path, model, config, config.port)
        async with await open_store(run) as store:
            await _serve(store, configs)


async def _serve(store: Store, configs: Configs) -> None:
    from agentrl.config.agreement import engine_settings
    from agentrl.observe.begin_run import begin_model, begin_run

    run, model, config = configs[RunConfig], configs[ModelConfig], configs[EngineConfig]
    await begin_run(store, configs, "serve", engine_settings(configs))
    await begin_model(store, model.model_name_or_path, "serve")
    copy = LocalCopy(await weights_dir(store, config.weights_dir))
    version, folder, first = await starting_weights(store, model, copy)
    lora = await _adapter_of(store, configs)
    port = config.port or free_port(config.host)
    host = socket.getfqdn() if config.host in ("0.0.0.0", "::") else config.host  # as samplers reach it
    client = engine_client(config.engine, config.engine_url or f"http://{host}:{port}", _UPDATE_SECONDS)
    is_shared = config.engine_url is not None
    adapters = ServedAdapters(
        client, copy, run_name=run.run_name, whole=version, folder=folder, is_shared=is_shared,
        why_merged=None if is_shared else why_merged(config.engine, folder, lora, has_gpu=has_gpu()),
    )  # fmt: skip
    service_id = f"{socket.gethostname().split('.')[0]}-{urlsplit(client.url).port}-{uuid.uuid4().hex[:6]}"
    lease = await _device_lease(run) if config.is_colocated else None
    process: EngineProcess | AttachedEngine
    if is_shared:
        process = await AttachedEngine.find(client, folder, config.engine_start_seconds)
    else:
        command = engine_command(folder, model, config, port, lora)
        log_file = Path(run.log_dir) / f"{run.run_name}_{config.engine}_{service_id}.log"
        # The engine has the locks too: the device is free when it has ended, also if this process is killed.
        process = EngineProcess(command, log_file, () if lease is None else lease.locks)
    served = ServedEngine(
        store, client, process, config, service_id=service_id, folder=folder, version=version, lease=lease,
        weights=ServedWeights(client, store, copy, adapters, loaded=version), first=first,
    )  # fmt: skip
    try:
        await _until_signal(served.run)
    finally:
        await adapters.leave()
        await client.close()
        await process.stop()


async def _adapter_of(store: Store, configs: Configs) -> AdapterConfig:
    """Return the adapter that the run trains: that of the flags, or the one that its trainer has stored."""
    config = configs[AdapterConfig]
    stored = (await store.settings.all()).get("adapter")
    return config if config.lora_rank or stored is None else AdapterConfig(**stored.values)


async def _device_lease(run: RunConfig) -> DeviceLease:
    """Wait for the devices that the trainer uses too, and hold them."""
    lease = DeviceLease(leased_devices(run.output), f"the engine of run {run.run_name}", shared=not has_gpu())
    await lease.acquire()
    return lease


async def _until_signal(work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` to its end; cancel it on SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
