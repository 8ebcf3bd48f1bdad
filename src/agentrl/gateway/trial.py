"""Give a trajectory that is only tried a gateway, which keeps its documents in a database of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agentrl.chat.chat_format import ChatFormat
from agentrl.config.gateway import GatewayConfig
from agentrl.config.load import Configs
from agentrl.config.schema import AgentConfig, RunConfig, SamplingConfig
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import CONTENT, Claim, Slot, Task
from agentrl.errors import LeaseLostError
from agentrl.gateway.chains import Chains
from agentrl.gateway.feedback import untrained
from agentrl.gateway.host import GatewayHost
from agentrl.gateway.model_calls import Answerer
from agentrl.inference.engine import Router
from agentrl.rollout.agent_io import Endpoint
from agentrl.rollout.setup import sampling_params
from agentrl.store.client import scratch_store

if TYPE_CHECKING:
    from agentrl.store.client import Store

_PREFIX = "agentrl_try"
_SPARE_SECONDS = 60.0
"""Time that the claim of the trajectory outlives ``--trajectory_timeout_seconds``."""


class TrialGateway:
    """Opens the gateway of one trajectory. Its database is dropped at the end; ``calls`` stays."""

    def __init__(self, configs: Configs, router: Router, chat_format: ChatFormat) -> None:
        self._configs = configs
        self._router = router
        self._chat_format = chat_format
        self.calls: Sequence[DispatchedSamplingTask] = ()
        """The model calls of the trajectory, when the endpoint is closed."""
        self.train_rule: str | None = None
        self.left_out: Sequence[int] = ()
        """Indexes of the calls that ``train_rule`` leaves out."""

    @asynccontextmanager
    async def open(self, claim: Claim, *, train: str, max_calls: int) -> AsyncIterator[Endpoint]:
        """Return the endpoint of the trajectory. Raises StoreError without a database that may be written."""
        async with scratch_store(self._configs[RunConfig], _PREFIX) as store:
            host = GatewayHost(self._answerer(store), GatewayConfig())
            own = await self._claim(store, claim.task)
            result = None
            try:
                async with host.open(own, train=train, max_calls=max_calls) as endpoint:
                    result = endpoint.result
                    yield endpoint
            finally:
                await host.close()
                self.calls = () if result is None else result.calls
                self.train_rule, self.left_out = train, untrained(train, self.calls)

    async def _claim(self, store: Store, tried: Task) -> Claim:
        """Store the task in the empty database, claim its only slot, and begin its Record."""
        content = {name: getattr(tried, name) for name in CONTENT}
        task = Task(
            id=tried.id, task_id=tried.task_id, split=tried.split, epoch=tried.epoch, order=0,
            slots=(Slot(traj_id=0),), **content,
        )  # fmt: skip
        await store.tasks.load([task])
        seconds = self._configs[AgentConfig].trajectory_timeout_seconds + _SPARE_SECONDS
        claim = await store.claims.claim(split=task.split, owner="try", lease_seconds=seconds)
        if claim is None:
            raise LeaseLostError(f"task {task.id} of this trial was claimed by another process")
        await store.records.create(claim)
        await store.records.advance(claim, RecordStatus.RUNNING)
        return claim

    def _answerer(self, store: Store) -> Answerer:
        return Answerer(
            store=store,
            router=self._router,
            chat_format=self._chat_format,
            params=sampling_params(self._configs[SamplingConfig], self._chat_format),
            agent=self._configs[AgentConfig],
            seed=self._configs[RunConfig].seed,
            chains=Chains(store),
        )
