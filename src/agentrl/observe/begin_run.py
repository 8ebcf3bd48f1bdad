"""Join a run: store its settings, or check that this process agrees with those stored."""

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
    """Store ``facts`` as the run's settings, or raise ConfigError if they contradict the stored ones.

    Call it before anything is claimed, loaded or trained. The first process of a role also stores its flags,
    except secret ones.
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
    """Store the shape and the tokenizer of the run's model; ConfigError if the run has another model."""
    if folder is None:
        return
    facts = await asyncio.to_thread(model_facts, Path(folder))
    if facts:
        await store.settings.begin("model", facts, role)
