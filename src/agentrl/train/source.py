"""Open what a trainer takes its data from: the live stream of its run, or the stored steps of its parent."""

from __future__ import annotations

from functools import partial

from agentrl.config.load import Configs
from agentrl.config.schema import EngineConfig, LossConfig, SamplingConfig, TaskConfig, TrainConfig
from agentrl.data.finalize_group import verifier
from agentrl.data.freshness import Freshness
from agentrl.data.planner import packing_problem
from agentrl.data.stream import DataStream, StepSource, StreamSettings
from agentrl.lab.recorded import RecordedSettings, open_recorded
from agentrl.lab.rescore import Regrouping
from agentrl.store.client import Store
from agentrl.train.controller import Controller
from agentrl.train.publishing import Progress


async def open_source(
    store: Store, configs: Configs, controller: Controller, progress: Progress, lead_in: int | None
) -> StepSource:
    """Return the run's live stream; for a what-if, the stored steps of its parent.

    ``lead_in`` is the last step of the parent that is trained with the parent's flags, while these are.
    """
    train, sampling = configs[TrainConfig], configs[SamplingConfig]
    parent = await store.ancestry.parent()
    if parent is None or parent.kind != "whatif":
        return _stream(store, configs, controller, progress)
    settings = RecordedSettings(
        freshness=freshness_of(configs),
        whitens=train.advantage_whitening == "batch",
        verifies=train.verify_data,
        regrouping=Regrouping(
            scorer_timeout_seconds=sampling.scorer_timeout_seconds,
            agent_config_path=sampling.agent_config_path,
        ),
    )
    return await open_recorded(store, parent, settings, progress.train_steps, lead_in)


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


def freshness_of(configs: Configs) -> Freshness:
    """Return how old tokens are treated."""
    return Freshness(
        max_staleness=max_staleness(configs),
        policy=configs[TrainConfig].staleness_policy,
        decay=configs[LossConfig].out_of_date_decay,
    )


def max_staleness(configs: Configs) -> int:
    """Return the largest age of the tokens of fresh data, in optimizer steps."""
    sampling = configs[SamplingConfig]
    return 0 if sampling.sync_sampling else sampling.max_staleness
