"""Open what a trainer takes its data from: the live stream of its run, or the stored steps of its parent."""

from __future__ import annotations

from functools import partial

from agentrl.config.load import Configs
from agentrl.config.schema import EngineConfig, TaskConfig, TrainConfig
from agentrl.data.finalize_group import verifier
from agentrl.data.planner import packing_problem
from agentrl.data.stream import STEP_SOURCES, DataStream, StepSource, StreamSettings, freshness_of
from agentrl.store.client import Store
from agentrl.train.controller import Controller
from agentrl.train.publishing import Progress


async def open_source(
    store: Store, configs: Configs, controller: Controller, progress: Progress, lead_in: int | None
) -> StepSource:
    """Return the run's live stream; for a what-if, the stored steps of its parent.

    ``lead_in`` is the last step of the parent that is trained with the parent's flags, while these are.
    Raises ConfigError if this installation cannot train steps of another run.
    """
    parent = await store.ancestry.parent()
    if parent is None or parent.kind == "fork":
        return _stream(store, configs, controller, progress)
    return await STEP_SOURCES.get(parent.kind)(store, parent, configs, progress.train_steps, lead_in)


def _stream(store: Store, configs: Configs, controller: Controller, progress: Progress) -> DataStream:
    tasks, train = configs[TaskConfig], configs[TrainConfig]
    settings = StreamSettings(
        groups_per_step=train.groups_per_step,
        num_epochs=tasks.num_train_epochs,
        freshness=freshness_of(configs),
        max_trained_count=train.max_trained_count,
        whitening=train.advantage_whitening,
        wait_seconds=train.data_wait_seconds,
        problem_of=partial(
            packing_problem,
            vocab_size=controller.policy.model.config.get_text_config().vocab_size,
            max_tokens=train.max_tokens,
        ),
        engine_alive_seconds=configs[EngineConfig].alive_seconds,
    )
    verify = verifier(store) if train.verify_data else None
    return DataStream(store, settings, progress.replay, verify=verify, attempt=progress.attempt)
