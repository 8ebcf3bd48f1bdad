"""How a process joins a run: its settings must be those that the run was begun with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.facts import Facts, model_facts, public_flags
from agentrl.config.load import Configs
from agentrl.config.schema import TaskConfig
from agentrl.observe.redact import redact

if TYPE_CHECKING:
    from agentrl.store.client import Store


async def begin_run(store: Store, configs: Configs, role: str, facts: Facts) -> None:
    """Write what the run is begun with, or compare: ConfigError where this process contradicts it.

    Called before anything is claimed, loaded or trained. The first process of a role leaves its flags; the
    secret ones are left out.
    """
    for concern, values in facts.items():
        await store.settings.begin(concern, values, role)
    if "tasks" not in facts and "num_generations" in configs.given:
        given = configs[TaskConfig].num_generations
        await store.settings.check("tasks", {"num_generations": given})
    flags = {
        name: redact(value) if isinstance(value, str) else value
        for name, value in public_flags(configs).items()
    }
    await store.settings.keep_flags(role, flags)


async def begin_model(store: Store, folder: str | Path | None, role: str) -> None:
    """Write the shape and the tokenizer of the run's model, or compare: ConfigError for another model."""
    if folder is None:
        return
    facts = await asyncio.to_thread(model_facts, Path(folder))
    if facts:
        await store.settings.begin("model", facts, role)
