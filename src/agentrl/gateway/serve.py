"""Run one gateway process: for trajectories of a run, and for conversations that no task asked for."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.base.bounded_http import is_loopback
from agentrl.base.concurrency import wait_for_any
from agentrl.base.processes import stop_on_signals
from agentrl.base.user_code import allow, is_listed
from agentrl.chat.chat_format import ChatFormat
from agentrl.columns.outages import Outages
from agentrl.columns.pool import Pool, owner_name
from agentrl.columns.scores import QueuedScores, Scoring
from agentrl.config.flags import require
from agentrl.config.load import Configs
from agentrl.config.sampling import AgentConfig, GatewayConfig
from agentrl.config.schema import (
    ClaimConfig,
    EngineConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
)
from agentrl.data.finalize_group import TRAIN_SPLIT
from agentrl.documents.document import replace_surrogates, sanitize_bson
from agentrl.documents.record import Failure, GatewaySession
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.documents.task import CONVERSATIONS, FEEDBACK, Claim, record_key, task_key
from agentrl.documents.task_json import kind_of
from agentrl.errors import AgentRLError, LeaseLostError, StoreError, TrajectoryError
from agentrl.gateway.answerer import Answerer
from agentrl.gateway.app import (
    CHAT,
    GatewayApp,
    GatewayServer,
    answer_errors,
    end_trajectory,
    given_keys,
    json_response,
    listen,
    read_body,
    require_reward_key,
    token_digest,
)
from agentrl.gateway.dialects.fields import load_body, short
from agentrl.gateway.feedback import give_feedback, require_rule
from agentrl.gateway.request import GatewayError, invalid
from agentrl.observe.begin_run import begin_model, begin_run
from agentrl.observe.logging import failure_text
from agentrl.rollout.agent_io import GatewayResult
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.rollout.setup import live_engines, model_folder, open_format, open_router, sampling_params
from agentrl.store.client import open_store
from agentrl.store.mechanics.retry import log_store_errors, retry_outages
from agentrl.weights.folder import require_folder

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
        key is not None or is_loopback(config.gateway_host),
        f"--gateway_train feedback on {config.gateway_host}: anybody could open conversations and give"
        " feedback",
        f"set the environment variable {config.gateway_key_env} to a secret key (--gateway_key_env), or"
        " listen on 127.0.0.1",
    )
    return key


@dataclass(kw_only=True)
class ProductConversations:
    """Opens conversations, ends them, takes feedback, scores and finalizes. Keeps no state of its own."""

    store: Store
    config: GatewayConfig
    agent: AgentConfig
    scoring: Scoring
    finalizer: GroupFinalizer
    key: str | None
    """The bearer token of the product; None: programs of this machine open conversations, and feedback needs
    the key of its conversation."""
    _queue: Pool[Claim] = field(init=False)
    _writing: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """A lock for each conversation: two writes at a time would only conflict in the database."""

    def __post_init__(self) -> None:
        scores = QueuedScores(self.scoring, split=TRAIN_SPLIT, owner=owner_name(), only_scorer=FEEDBACK)
        concurrency = self.scoring.sampling.max_concurrent_scorings
        self._queue = Pool(self.store, scores, self.scoring.claims, concurrency)

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
        """End a conversation: it is scored if it has feedback, else it waits for it.

        One that cannot be ended fails by itself: every gateway of the run would meet it again.
        """
        try:
            try:
                await self._finish(claim)
            except StoreError:
                raise
            except Exception as error:
                logger.exception("a conversation cannot be ended", extra={"record": claim.record_id})
                failure = Failure(kind=TrajectoryError.kind, message=failure_text(error))
                await self.store.attempts.fail(claim, failure, max_attempts=1, backoff_seconds=0.0)
        except LeaseLostError:
            logger.info("another gateway ended a conversation", extra={"record": claim.record_id})

    async def _finish(self, claim: Claim) -> None:
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

    def _handler(self, handle: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handled(request: Request) -> Response:
            async def answer() -> Response:
                return await handle(request, load_body(await read_body(request, self.config) or b"{}"))

            return await answer_errors(CHAT, answer)

        return handled

    def _has_key(self, request: Request) -> bool:
        """Return whether a request has the gateway's key, which is good for every conversation."""
        wanted = (self.key or "").encode()
        given = given_keys(request).values()
        return self.key is not None and any(secrets.compare_digest(key.encode(), wanted) for key in given)

    async def _require_key_of(self, request: Request, name: str) -> None:
        """Raise GatewayError without the gateway's key, or the feedback key of the conversation ``name``.

        Ids are not secret: they are in the database, in logs and on pages, and a task's can be guessed.
        """
        if not self._has_key(request):
            record = record_key(task_key(TRAIN_SPLIT, CONVERSATIONS, name), 0, 1)
            require_reward_key(request, await self.store.gateways.session_of(record))

    async def _open(self, request: Request, body: dict[str, Any]) -> Response:
        if self.key is not None and not self._has_key(request):
            raise GatewayError(
                "authentication", "the key in authorization is not that of this gateway", code="wrong_key",
                hint=f"--gateway_key_env {self.config.gateway_key_env} names it",
            )  # fmt: skip
        unknown = sorted(set(body) - set(_FIELDS))
        if unknown:
            raise invalid(
                f"a conversation has no field {short(unknown[0])}: {', '.join(_FIELDS)}", unknown[0]
            )
        query, meta, train = body.get("query", ""), body.get("meta") or {}, body.get("train", "main")
        if not isinstance(query, str) or not isinstance(meta, Mapping):
            wrong, value = ("meta", meta) if isinstance(query, str) else ("query", query)
            raise invalid(f"{wrong} is {kind_of(value)}", wrong)
        if not isinstance(train, str):
            raise invalid(f"train is {kind_of(train)}", "train")
        if not is_listed(train):
            raise invalid(
                f"this gateway imports no rule {short(train)} for a client; --allowed_modules lists modules"
                " that it may import",
                "train",
            )
        try:
            require_rule(train)
        except AgentRLError as error:
            raise invalid(error.message, "train") from error
        name, token = f"conv-{secrets.token_hex(12)}", secrets.token_urlsafe(32)
        feedback_key = secrets.token_urlsafe(32)
        task = task_key(TRAIN_SPLIT, CONVERSATIONS, name)
        session = GatewaySession(
            id=token_digest(token), record=record_key(task, 0, 1), task=task, traj_id=0, attempt=1,
            owner=name, models=self.config.models, max_calls=self.agent.max_turns,
            reward_key_digest=token_digest(feedback_key),
        )  # fmt: skip
        await self.store.conversations.open(
            name, session, query=replace_surrogates(query), meta=sanitize_bson(replace_surrogates(meta)),
            train=train, order=int(time.time() * 1000),
            idle_seconds=self.config.idle_seconds,
        )  # fmt: skip
        url = f"{str(request.base_url).rstrip('/')}/t/{token}/v1"
        opened = {"id": name, "base_url": url, "api_key": token, "model": session.models[0]}
        return json_response({**opened, "feedback_key": feedback_key}, 201)

    async def _end(self, request: Request, body: dict[str, Any]) -> Response:
        name = request.path_params["id"]
        await self._require_key_of(request, name)
        await self._end_named(name)
        return json_response({"status": "ended"})

    async def _end_named(self, name: str) -> None:
        claim = await self.store.conversations.running(TRAIN_SPLIT, name)
        if claim is not None:
            await self.end(claim)

    async def _feedback(self, request: Request, body: dict[str, Any]) -> Response:
        name, ends = replace_surrogates(body.pop("id", None)), body.pop("end", False)
        await self._require_key_of(request, name if isinstance(name, str) else "")
        if not isinstance(name, str) or not isinstance(ends, bool):
            wrong, value = ("end", ends) if isinstance(name, str) else ("id", name)
            raise invalid(f"{wrong} is {kind_of(value)}", wrong)
        async with self._writing.setdefault(name, asyncio.Lock()):
            await give_feedback(self.store, name, body)
        if ends:
            await self._end_named(name)
        self._queue.wake()
        return json_response({"status": "stored"})


async def serve_gateway(configs: Configs) -> None:
    """Serve until a signal."""
    run = configs[RunConfig]
    require_folder(configs[ModelConfig])
    if configs[GatewayConfig].gateway_train != "tasks":
        require_key(configs[GatewayConfig])
    # Open both before the database: a start that is refused makes no run.
    is_named = configs[ModelConfig].model_name_or_path is not None
    chat_format = await open_format(None, configs) if is_named else None
    listener = listen(configs[GatewayConfig])
    stop = stop_on_signals()
    with retry_outages(run.db_wait_seconds, stop):
        async with await open_store(run) as store, _answerer(store, configs, chat_format) as answerer:
            conversations = await _conversations(store, configs)
            app = GatewayApp(
                answerer, configs[GatewayConfig], () if conversations is None else conversations.routes()
            )
            server = GatewayServer(app, configs[GatewayConfig])
            await server.start(listener)
            try:
                await (stop.wait() if conversations is None else conversations.run(stop))
            finally:
                await app.close()
                await server.close()


async def _conversations(store: Store, configs: Configs) -> ProductConversations | None:
    """Return the conversations of ``--gateway_train feedback``; None if the gateway serves tasks alone."""
    config = configs[GatewayConfig]
    if config.gateway_train == "tasks":
        return None
    key = require_key(config)
    allow(configs[TaskConfig].allowed_names)
    await begin_run(store, configs, "gateway", {})
    await begin_model(store, configs[ModelConfig].model_name_or_path, "gateway")
    sampling = configs[SamplingConfig]
    outages = Outages(sampling.outage_wait_seconds)
    return ProductConversations(
        store=store,
        config=config,
        agent=configs[AgentConfig],
        scoring=Scoring(store=store, outages=outages, sampling=sampling, claims=configs[ClaimConfig]),
        finalizer=GroupFinalizer(
            store, configs[GroupConfig], split=TRAIN_SPLIT, seed=configs[RunConfig].seed
        ),
        key=key,
    )


@asynccontextmanager
async def _answerer(
    store: Store, configs: Configs, chat_format: ChatFormat | None
) -> AsyncIterator[Answerer]:
    chat_format = chat_format or await open_format(store, configs)
    folder = await model_folder(store, configs)
    engine = configs[EngineConfig]
    router = open_router(lambda: live_engines(store, engine), configs, chat_format, folder)
    try:
        await router.engines.refresh()
        yield Answerer(
            store=store,
            router=router,
            chat_format=chat_format,
            params=sampling_params(configs[SamplingConfig], chat_format),
            agent=configs[AgentConfig],
            seed=configs[RunConfig].seed,
        )
    finally:
        await router.close()
