"""Open the base URLs of a sampler's trajectories, and start a gateway in the process when one is needed."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from agentrl.config.gateway import GatewayConfig
from agentrl.data.finalize_group import describe_share
from agentrl.documents.gateway import GatewaySession
from agentrl.documents.model_call import DispatchedSamplingTask, branches_of, main_branch, of_main_role
from agentrl.documents.task import Claim
from agentrl.gateway.answerer import Answerer
from agentrl.gateway.app import GatewayApp, token_digest
from agentrl.gateway.feedback import require_rule, untrained
from agentrl.gateway.server import GatewayServer
from agentrl.rollout.agent_io import Endpoint, GatewayResult
from agentrl.rollout.prompts import chain_of

logger = logging.getLogger(__name__)


class GatewayHost:
    """Opens endpoints. With ``--gateway_url`` another process serves them, else a server in this one."""

    def __init__(self, answerer: Answerer, config: GatewayConfig) -> None:
        self._store = answerer.store
        self._config = config
        self._app = GatewayApp(answerer, config)
        self._server: GatewayServer | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def open(self, claim: Claim, *, train: str, max_calls: int) -> AsyncIterator[Endpoint]:
        """Open the endpoint of a trajectory; close it and store which calls are trained at the end.

        Raises ConfigError for an unknown rule, and LeaseLostError if the claim is lost.
        """
        require_rule(train)
        token = secrets.token_urlsafe(32)
        session = GatewaySession(
            id=token_digest(token),
            record=claim.record_id,
            task=claim.task.id,
            traj_id=claim.traj_id,
            attempt=claim.attempt,
            owner=claim.owner,
            models=self._config.models,
            max_calls=max_calls,
            trace_id=claim.trace_id,
        )
        url = await self._url()
        await self._store.gateways.open_session(session)
        endpoint = Endpoint(base_url=f"{url}/t/{token}/v1", api_key=token, model=session.models[0])
        try:
            yield endpoint
        finally:
            await self._close(claim, session, train, endpoint.result)

    async def close(self) -> None:
        """Stop the server and the answers under way."""
        await self._app.close()
        if self._server is not None:
            await self._server.close()

    async def _url(self) -> str:
        if self._config.gateway_url is not None:
            return self._config.gateway_url.rstrip("/")
        async with self._starting:
            if self._server is None:
                server = GatewayServer(self._app, replace(self._config, gateway_port=0))
                await server.start()
                self._server = server
        return self._server.url

    async def _close(self, claim: Claim, session: GatewaySession, train: str, result: GatewayResult) -> None:
        closed = await self._store.gateways.close_session(session.id)
        await self._app.close_record(claim.record_id)
        result.stopped_by = None if closed is None else closed.stopped_by
        result.calls = await self._store.model_calls.by_record(claim.record_id)
        result.messages = main_messages(result.calls)
        record = await self._store.records.get(claim.record_id)
        result.reward = None if record is None else record.reported_reward
        left_out = untrained(train, result.calls)
        await self._store.records.keep(claim, train_rule=train, untrained_calls=left_out)
        if left_out:
            share = describe_share(result.calls, train, left_out)
            logger.info("a trajectory is trained in part", extra={"record": claim.record_id, "share": share})


def main_messages(calls: Sequence[DispatchedSamplingTask]) -> list[dict[str, object]]:
    """Return the conversation of the main branch."""
    main = main_branch(branches_of(of_main_role(calls)))
    if main is None:
        return []
    return chain_of({call.id: call for call in calls}, main.calls[-1].id).messages
