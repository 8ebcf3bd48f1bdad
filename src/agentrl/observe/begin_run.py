"""Join a run: store its settings, or check that this process agrees with those stored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.agreement import (
    AgreedSettings,
    model_settings,
    package_versions,
    per_process_flags,
    public_flags,
)
from agentrl.config.load import Configs
from agentrl.config.schema import ModelConfig, TaskConfig
from agentrl.documents.run import RunSettings, flags_key
from agentrl.observe.logging import redact
from agentrl.store.settings import settings_document

if TYPE_CHECKING:
    from agentrl.store.client import Store


logger = logging.getLogger(__name__)


async def begin_run(
    store: Store,
    configs: Configs,
    role: str,
    agreed: AgreedSettings,
    resolved: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
) -> RunSettings:
    """Store ``agreed`` as the run's settings, or raise ConfigError if they contradict the stored ones.

    Call it before anything is claimed, loaded or trained. The first process of a role also stores its
    ``resolved_flags``. A later process logs a warning for each flag that differs although data stay right.
    Return the resolved flags: a trainer stores them at its start (``Settings.start``).
    """
    for concern, values in agreed.items():
        await store.settings.begin(concern, values, role)
    await _check_group_size(store, configs, agreed)
    own = resolved_flags(configs, role, agreed, resolved, threads=threads)
    differing = await store.settings.join(
        role, own.values, given=own.given, packages=own.packages or {}, threads=threads,
        per_process=per_process_flags(),
    )  # fmt: skip
    for line in differing:
        logger.warning("this process differs from the run: %s", line)
    return own


def resolved_flags(
    configs: Configs,
    role: str,
    agreed: AgreedSettings,
    resolved: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
) -> RunSettings:
    """Return the configuration of this process as a run stores it: its flags, except secret ones.

    With the values of ``agreed`` and ``resolved`` for flags that were not given, the versions of packages,
    and a trainer's ``threads``.
    """
    flags = public_flags(configs)
    for values in (*agreed.values(), dict(resolved or {})):
        flags |= {name: value for name, value in values.items() if name in flags}
    return settings_document(
        flags_key(role),
        {name: redact(value) if isinstance(value, str) else value for name, value in flags.items()},
        role,
        given=tuple(sorted(configs.given)),
        packages=package_versions(),
        threads=threads,
    )


async def check_run(
    store: Store, configs: Configs, agreed: AgreedSettings, folder: str | Path | None
) -> None:
    """Raise ConfigError if ``agreed`` or the model in ``folder`` contradict the run; write nothing."""
    for concern, values in agreed.items():
        await store.settings.check(concern, values)
    await _check_group_size(store, configs, agreed)
    if folder is not None:
        await store.settings.check("model", await asyncio.to_thread(model_settings, Path(folder)))


async def _check_group_size(store: Store, configs: Configs, agreed: AgreedSettings) -> None:
    if "tasks" not in agreed and "num_generations" in configs.given:
        given = configs[TaskConfig].num_generations
        await store.settings.check("tasks", {"num_generations": given})


async def begin_model(store: Store, folder: str | Path | None, role: str) -> None:
    """Store the shape and the tokenizer of the run's model; ConfigError if the run has another model."""
    if folder is None:
        return
    agreed = await asyncio.to_thread(model_settings, Path(folder))
    if agreed:
        await store.settings.begin("model", agreed, role)


async def begin_files(store: Store, model: ModelConfig) -> None:
    """Store the SHA-256 of the base's and the reference's files; ConfigError if they have changed since.

    A run that was last trained before they were stored is compared with its version 0, the base in place.
    """
    from agentrl.weights.folder import is_read, read_files

    folders = {"base": model.model_name_or_path, "reference": model.reference_model}
    agreed: dict[str, Any] = {}
    for name, folder in folders.items():
        if folder is not None:
            agreed |= _listed(name, await asyncio.to_thread(read_files, Path(folder)))
    first, lease = await store.policy_versions.get(0), await store.trainer_lease.read()
    if first is not None and lease.output is None and await store.ancestry.parent() is None:
        begun = {file.name: file.sha256 for file in first.files}
        read = {name for name in begun if is_read(name) or f"base/{name}" in agreed}
        await store.settings.begin("files", _listed("base", {name: begun[name] for name in read}), "train")
    await store.settings.begin("files", agreed, "train")


async def check_base(store: Store, folder: str | None) -> None:
    """Raise ConfigError if the run has begun from other files than ``folder`` has: they would not be served.

    The trainer stores them. Before it has, a run may begin from any model of its shape.
    """
    from agentrl.weights.folder import read_files

    stored = (await store.settings.all()).get("files")
    if folder is not None and stored is not None and "base" in stored.values:
        files = await asyncio.to_thread(read_files, Path(folder))
        await store.settings.check("files", _listed("base", files))


def _listed(model: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the SHA-256 of each file of a model as a setting, and the list of files as another."""
    return {model: sorted(files), **{f"{model}/{name}": digest for name, digest in files.items()}}
