"""Conversations of a product that no task asked for: open one, give it feedback by its id, end it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.concurrency import wait_for_any
from agentrl.config.agent import AgentConfig, GatewayConfig
from agentrl.config.flags import require
from agentrl.data.finalize_group import TRAIN_SPLIT
from agentrl.documents.gateway import GatewaySession
from agentrl.documents.record import Failure
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.documents.task import CONVERSATIONS, FEEDBACK, Claim, record_key, task_key
from agentrl.errors import AgentRLError, LeaseLostError
from agentrl.gateway.app import CHAT, answer_errors, json_response, read_body, token_digest
from agentrl.gateway.dialects.fields import kind_of, load_body, short
from agentrl.gateway.feedback import give_feedback, require_rule
from agentrl.gateway.host import end_trajectory
from agentrl.gateway.request import GatewayError, invalid
from agentrl.rollout.agent_io import GatewayResult
from agentrl.rollout.finalizer import GroupFinalizer
from agentrl.rollout.held_claims import owner_name
from agentrl.rollout.scoring import Scoring, ScoringQueue
from agentrl.store.mechanics.retry import log_store_errors

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Interval of looks for silent conversations and for groups to finalize."""
_FIELDS = ("query", "meta", "train")
Handler = Callable[[Request, dict[str, Any]], Awaitable[Response]]


def require_key(config: GatewayConfig) -> str | None:
    """Return the key that products must give; None without one. Raises ConfigError where one is needed."""
    key = os.environ.get(config.gateway_key_env) or None
    require(
        key is not None or _is_loopback(config.gateway_host),
        f"--gateway_train feedback on {config.gateway_host}: anybody could open conversations and give"
        " feedback",
        f"set the environment variable {config.gateway_key_env} to a secret key (--gateway_key_env), or"
        " listen on 127.0.0.1",
    )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(kw_only=True)
class Conversations:
    """Opens conversations, ends them, takes feedback, scores and finalizes. Keeps no state of its own."""

    store: Store
    config: GatewayConfig
    agent: AgentConfig
    scoring: Scoring
    finalizer: GroupFinalizer
    key: str | None
    """The bearer token of the product; None: everybody who reaches the gateway."""
    _queue: ScoringQueue = field(init=False)

    def __post_init__(self) -> None:
        self._queue = ScoringQueue(
            self.scoring, split=TRAIN_SPLIT, owner=owner_name(), only_scorer=FEEDBACK,
            concurrency=self.scoring.sampling.max_concurrent_scorings,
        )  # fmt: skip

    def routes(self) -> list[Route]:
        """Return the routes for products."""
        return [
            Route("/conversations", self._handler(self._open), methods=["POST"]),
            Route("/conversations/{id}/end", self._handler(self._end), methods=["POST"]),
            Route("/feedback", self._handler(self._feedback), methods=["POST"]),
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """End silent conversations, score what got feedback and finalize it, until ``stop``."""
        scoring = asyncio.create_task(self._queue.run(stop), name="feedback")
        try:
            while not stop.is_set() and not scoring.done():
                with log_store_errors(logger, "conversations are not ended now", outages=True):
                    while (claim := await self.store.conversations.take_silent(TRAIN_SPLIT)) is not None:
                        await self.end(claim)
                    for task in await self.store.groups.waiting(TRAIN_SPLIT, epoch=CONVERSATIONS):
                        await self.finalizer.finalize(task)
                await wait_for_any(stop, timeout=_LOOK_SECONDS)
        finally:
            stop.set()
            await scoring

    async def end(self, claim: Claim) -> None:
        """End a conversation: it is scored if it has feedback, else it waits for it."""
        try:
            record = await self.store.records.get(claim.record_id)
            if record is not None and record.status is RecordStatus.RUNNING:
                session = await self.store.gateways.session_of(claim.record_id)
                closed = None if session is None else await self.store.gateways.close_session(session.id)
                result = GatewayResult()
                await end_trajectory(self.store, claim, closed, record.train_rule or "main", result)
                if not result.calls:
                    failure = Failure(kind=FEEDBACK, message="the conversation ended without a message")
                    await self.store.attempts.fail(claim, failure, max_attempts=1, backoff_seconds=0.0)
                    return
                answer = result.messages[-1].get("content") if result.messages else None
                await self.store.records.advance(
                    claim, RecordStatus.COMPLETED, stop_reason=StopReason.ANSWERED,
                    final_answer=answer if isinstance(answer, str) else None,
                )  # fmt: skip
            await self.scoring.score_stored(claim)
        except LeaseLostError:
            logger.info("another gateway ended a conversation", extra={"record": claim.record_id})

    def _handler(self, handle: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handled(request: Request) -> Response:
            async def answer() -> Response:
                given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
                if self.key is not None and not secrets.compare_digest(given.encode(), self.key.encode()):
                    raise GatewayError(
                        "authentication", "the key in authorization is not that of this gateway",
                        code="wrong_key", hint=f"--gateway_key_env {self.config.gateway_key_env} names it",
                    )  # fmt: skip
                return await handle(request, load_body(await read_body(request, self.config) or b"{}"))

            return await answer_errors(CHAT, answer)

        return handled

    async def _open(self, request: Request, body: dict[str, Any]) -> Response:
        unknown = sorted(set(body) - set(_FIELDS))
        if unknown:
            raise invalid(
                f"a conversation has no field {short(unknown[0])}: {', '.join(_FIELDS)}", unknown[0]
            )
        query, meta, train = body.get("query", ""), body.get("meta") or {}, body.get("train", "main")
        if not isinstance(query, str) or not isinstance(meta, Mapping):
            wrong, value = ("meta", meta) if isinstance(query, str) else ("query", query)
            raise invalid(f"{wrong} is {kind_of(value)}", wrong)
        try:
            require_rule(train)
        except AgentRLError as error:
            raise invalid(error.message, "train") from error
        name, token = f"conv-{secrets.token_hex(12)}", secrets.token_urlsafe(32)
        task = task_key(TRAIN_SPLIT, CONVERSATIONS, name)
        session = GatewaySession(
            id=token_digest(token), record=record_key(task, 0, 1), task=task, traj_id=0, attempt=1,
            owner=name, models=self.config.models, max_calls=self.agent.max_turns,
        )  # fmt: skip
        await self.store.conversations.open(
            name, session, query=query, meta=dict(meta), train=train, order=int(time.time() * 1000),
            idle_seconds=self.config.idle_seconds,
        )  # fmt: skip
        url = f"{str(request.base_url).rstrip('/')}/t/{token}/v1"
        return json_response({"id": name, "base_url": url, "api_key": token, "model": session.models[0]}, 201)

    async def _end(self, request: Request, body: dict[str, Any]) -> Response:
        await self._end_named(request.path_params["id"])
        return json_response({"status": "ended"})

    async def _end_named(self, name: str) -> None:
        claim = await self.store.conversations.running(TRAIN_SPLIT, name)
        if claim is not None:
            await self.end(claim)

    async def _feedback(self, request: Request, body: dict[str, Any]) -> Response:
        name, ends = body.pop("id", None), body.pop("end", False)
        if not isinstance(name, str) or not isinstance(ends, bool):
            wrong, value = ("end", ends) if isinstance(name, str) else ("id", name)
            raise invalid(f"{wrong} is {kind_of(value)}", wrong)
        await give_feedback(self.store, name, body)
        if ends:
            await self._end_named(name)
        self._queue.wake()
        return json_response({"status": "stored"})
