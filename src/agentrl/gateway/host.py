"""Open the base URLs of a sampler's trajectories; run a gateway's HTTP server in the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import uvicorn

from agentrl.bounded_http import bind, server_config
from agentrl.concurrency import end_tasks, wait_for_any
from agentrl.config.agent import GatewayConfig
from agentrl.config.flags import names_in
from agentrl.data.trained_share import describe_share
from agentrl.documents.gateway import GatewaySession
from agentrl.documents.model_call import DispatchedSamplingTask, branches_of, main_branch, of_main_role
from agentrl.documents.task import Claim
from agentrl.errors import AgentRLError
from agentrl.gateway.answerer import Answerer
from agentrl.gateway.app import GatewayApp, token_digest
from agentrl.gateway.feedback import require_rule, untrained
from agentrl.own_hosts import for_own_hosts
from agentrl.rollout.agent_io import Endpoint, GatewayResult
from agentrl.rollout.prompts import chain_of
from agentrl.scoring.scorers import ScoreResult

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

_START_SECONDS, _STOP_SECONDS = 30.0, 5.0


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class GatewayServer:
    """The server of one process."""

    def __init__(self, app: GatewayApp, config: GatewayConfig) -> None:
        self._config = config
        names = names_in(config.gateway_allowed_hosts)
        hint = "--gateway_allowed_hosts lists further names of the gateway"
        self._server = _Server(
            server_config(for_own_hosts(app.app(), config.gateway_host, *names, hint=hint))
        )
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address is taken, AgentRLError if the server does not start."""
        host, port = self._config.gateway_host, self._config.gateway_port
        listener = bind(host, port, "a gateway", hint="choose another --gateway_port, or 0 for a free one")
        bound_port = listener.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"
        self._task = asyncio.create_task(self._server.serve([listener]), name="gateway")
        await wait_for_any(self._server.is_up, tasks=[self._task], timeout=_START_SECONDS)
        if not self._server.is_up.is_set():
            error = self._task.exception() if self._task.done() else None
            await self.close()
            listener.close()
            raise error or AgentRLError(
                f"the HTTP server of the gateway has not started within {_START_SECONDS:g} s",
                hint="its log says why; a machine that is overloaded may only need another attempt",
            )
        logger.info("gateway listens at %s", self.url)

    async def close(self) -> None:
        """Stop listening; open connections are closed."""
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=_STOP_SECONDS)
        await end_tasks(self._task)


class GatewayHost:
    """Opens endpoints. With ``--gateway_url`` another process serves them, else a server in this one."""

    def __init__(self, answerer: Answerer, config: GatewayConfig) -> None:
        self._store = answerer.store
        self._config = config
        self._app = GatewayApp(answerer, config)
        self._server: GatewayServer | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def open(
        self, claim: Claim, *, train: str, max_calls: int, takes_reward: bool = True
    ) -> AsyncIterator[Endpoint]:
        """Open the endpoint of a trajectory; close it and store which calls are trained at the end.

        Raises ConfigError for an unknown rule, and LeaseLostError if the claim is lost.
        """
        require_rule(train)
        token = secrets.token_urlsafe(32)
        reward_key = secrets.token_urlsafe(32) if takes_reward else None
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
            reward_key_digest=None if reward_key is None else token_digest(reward_key),
        )
        url = await self._url()
        await self._store.gateways.open_session(session)
        endpoint = Endpoint(
            base_url=f"{url}/t/{token}/v1", api_key=token, model=session.models[0], reward_key=reward_key
        )
        try:
            yield endpoint
        finally:
            closed = await self._store.gateways.close_session(session.id)
            await self._app.close_record(claim.record_id)
            await end_trajectory(self._store, claim, closed, train, endpoint.result)

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


async def end_trajectory(
    store: Store, claim: Claim, closed: GatewaySession | None, train: str, result: GatewayResult
) -> None:
    """Fill ``result`` when the base URL is closed, and store which calls the rule ``train`` leaves out."""
    result.stopped_by = None if closed is None else closed.stopped_by
    result.calls = await store.model_calls.by_record(claim.record_id)
    result.messages = main_messages(result.calls)
    record = await store.records.get(claim.record_id)
    if record is not None and (reward := record.reported_reward) is not None:
        by_call = {int(call): value for call, value in reward.turn_rewards.items()}
        roles = reward.role_rewards or None
        result.reward = ScoreResult(reward.score, reward.details, by_call or None, roles)
    left_out = untrained(train, result.calls)
    await store.records.keep(claim, train_rule=train, untrained_calls=left_out)
    if left_out:
        share = describe_share(result.calls, train, left_out)
        logger.info("a trajectory is trained in part", extra={"record": claim.record_id, "share": share})


def main_messages(calls: Sequence[DispatchedSamplingTask]) -> list[dict[str, object]]:
    """Return the conversation of the main branch."""
    main = main_branch(branches_of(of_main_role(calls)))
    if main is None:
        return []
    return chain_of({call.id: call for call in calls}, main.calls[-1].id).messages
