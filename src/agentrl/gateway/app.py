"""Serve the routes of a gateway, in a process of its own or a sampler's: a base URL for each trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentrl.base.bounded_http import bind, for_own_hosts, server_config
from agentrl.base.concurrency import end_tasks, wait_for_any
from agentrl.calls.prompts import chain_of
from agentrl.chat.chat_format import TextStream
from agentrl.config.flags import names_in
from agentrl.config.sampling import GatewayConfig, is_pattern
from agentrl.data.finalize_group import describe_share
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    branches_of,
    main_branch,
    of_main_role,
    role_problem,
)
from agentrl.documents.record import GatewaySession
from agentrl.documents.task import CONVERSATIONS, FEEDBACK, Claim
from agentrl.errors import AgentRLError, LeaseLostError, RunMissingError, StoreUnavailableError
from agentrl.gateway.answerer import Answerer, answer_of
from agentrl.gateway.dialects.anthropic_messages import Messages
from agentrl.gateway.dialects.fields import load_body, require_model
from agentrl.gateway.dialects.openai_chat import ChatCompletions
from agentrl.gateway.dialects.openai_responses import Responses
from agentrl.gateway.feedback import read_reward, require_rule, untrained
from agentrl.gateway.pending import PendingAnswer, PendingAnswers
from agentrl.gateway.replay import dropped_calls
from agentrl.gateway.request import (
    LARGE_JSON,
    Caller,
    Dialect,
    GatewayError,
    GatewayRequest,
    aside,
    dead_url,
    invalid,
)
from agentrl.rollout.agent_io import Endpoint, GatewayResult
from agentrl.scoring.scorers import ScoreResult
from agentrl.store.model_calls import counts_of

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

CHAT = ChatCompletions()
MESSAGES = Messages()
RESPONSES = Responses()
_KEY_HEADERS = ("authorization", "x-api-key", "api-key")
_CALLERS = 4096
"""Trajectories that a process knows; of others it reads the session and the task again."""
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class GatewayApp:
    """The HTTP application of a gateway. It keeps no state that another gateway would need."""

    def __init__(self, answerer: Answerer, config: GatewayConfig, routes: Sequence[Route] = ()) -> None:
        """``routes`` are served beside those of trajectories."""
        self.answerer = answerer
        self.config = config
        self._more = routes
        self.name = f"gateway-{secrets.token_hex(6)}"
        self._callers: dict[str, Caller] = {}
        self._pending = PendingAnswers(answerer, config, self.name, lambda key: self._callers.pop(key, None))

    def app(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/t/{token}/reward", self._reward, methods=["POST"]),
                *self._routes("/t/{token}/v1"),
                *self._routes("/t/{token}/role/{role}/v1"),
                *self._more,
                Route("/{path:path}", self._unknown, methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    def _routes(self, base: str) -> list[Route]:
        """Return the routes of the APIs below a base URL."""
        count = self._guarded(MESSAGES, self._count_tokens)
        return [
            Route(f"{base}/models", self._guarded(CHAT, self._models), methods=["GET"]),
            Route(base + "/models/{model:path}", self._guarded(CHAT, self._model), methods=["GET"]),
            Route(f"{base}/chat/completions", self._generation(CHAT), methods=["POST"]),
            Route(f"{base}/responses", self._generation(RESPONSES), methods=["POST"]),
            Route(f"{base}/messages", self._generation(MESSAGES), methods=["POST"]),
            Route(f"{base}/messages/count_tokens", count, methods=["POST"]),
        ]

    async def close(self) -> None:
        """Cancel the answers that are under way."""
        await self._pending.close()

    async def close_session(self, session_id: str) -> None:
        """Cancel the answers that are under way for one base URL."""
        self._callers.pop(session_id, None)
        await self._pending.close(session_id)

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _unknown(self, request: Request) -> Response:
        before, token, rest = request.url.path.partition("/t/")
        route = f"{before}/t/…/{rest.partition('/')[2]}" if token else before
        error = GatewayError(
            "not_found",
            f"there is no {request.method} {route[:200]}",
            code="not_found",
            hint="the base URL is …/t/TOKEN/v1; docs/gateway.md lists its routes",
        )
        return json_response(_shape_of(request).error(error), error.status)

    def _guarded(
        self,
        dialect: Dialect,
        handle: Callable[[Request, Caller], Awaitable[Response]],
        *,
        checks_known: bool = True,
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that authenticates, bounds the time of a request and answers errors.

        Without ``checks_known`` the handler itself checks that a known trajectory still runs.
        """

        async def guarded(request: Request) -> Response:
            async def answer() -> Response:
                _check_keys(request)
                return await handle(request, await self._caller(request, checks_known=checks_known))

            return await answer_errors(_shape_of(request) if dialect is CHAT else dialect, answer)

        return guarded

    def _generation(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def generate(request: Request, caller: Caller) -> Response:
            asked, digest_of = await self._read(request, dialect, caller)
            require_model(asked, caller.session.models)
            if caller.claim.task.epoch == CONVERSATIONS:
                await self.answerer.store.claims.heartbeat([caller.claim], self.config.idle_seconds)
            asked = await self.answerer.prompts.resolve(caller.claim, asked)
            pending = self._pending.get(caller, dialect.name, asked, digest_of)
            if asked.stream:
                events = self._events(dialect, asked, pending)
                first = await anext(events)  # an error before the first token has a status of its own
                return _EventResponse(
                    _chain(first, events), media_type="text/event-stream", headers=_STREAM_HEADERS
                )
            call = await pending.result()
            answer = answer_of(call, asked, pending.call, self.answerer.chat_format)
            return json_response(dialect.answer(answer))

        return self._guarded(dialect, generate, checks_known=False)

    async def _events(
        self, dialect: Dialect, asked: GatewayRequest, pending: PendingAnswer
    ) -> AsyncIterator[bytes]:
        """Yield the events of an answer; it is stored before its last event."""
        prompt_ids = await pending.prompt()
        call = pending.call
        chat_format = self.answerer.chat_format
        stream = dialect.stream(asked)
        text = TextStream(chat_format, prompt_ids or (), asked.stop, chat_format.call_marks)
        for event in stream.begin(call.answer_id, int(call.created_at.timestamp()), len(prompt_ids or ())):
            yield event
        try:
            async for start, ids in pending.tokens():
                for delta in text.add(start, ids):
                    for event in stream.delta(delta):
                        yield event
            stored = await pending.result()
            answer = answer_of(stored, asked, pending.call, chat_format)
            rest = text.finish(answer.reasoning, answer.content)
            if rest is None:
                raise GatewayError(
                    "unavailable", "the answer changed while it was sent", code="answer_changed",
                    hint="send the request again: the whole answer is stored",
                )  # fmt: skip
            for delta in rest:
                for event in stream.delta(delta):
                    yield event
            for event in stream.end(answer):
                yield event
        except GatewayError as error:
            yield dialect.error_event(error)

    async def _read(
        self, request: Request, dialect: Dialect, caller: Caller
    ) -> tuple[GatewayRequest, tuple[bytes, str | None]]:
        """Return the request, and what identifies its retries: the body and the idempotency key."""
        body = await read_body(request, self.config)
        role = request.path_params.get("role")
        if role is not None and (problem := role_problem(role)) is not None:
            raise invalid(problem, "role")
        asked = await aside(len(body) > LARGE_JSON, lambda: parse_body(dialect, body))
        asked = replace(asked, role=role, size=len(body), volatile=caller.session.volatile)
        return asked, (body, request.headers.get("idempotency-key"))

    async def _caller(self, request: Request, *, checks_known: bool) -> Caller:
        """Return the trajectory of a request's token. Raises GatewayError unless its claim is alive."""
        session_id = token_digest(request.path_params["token"])
        known = self._callers.get(session_id)
        if known is None:
            known = self._callers[session_id] = await self._load_caller(session_id)
            while len(self._callers) > _CALLERS:
                self._callers.pop(next(iter(self._callers)))
        elif checks_known and await self.answerer.store.gateways.live_calls(session_id) is None:
            self._callers.pop(session_id, None)
            raise dead_url()
        return known

    async def _load_caller(self, session_id: str) -> Caller:
        store = self.answerer.store
        session = await store.gateways.session(session_id)
        if session is None or await store.gateways.live_calls(session_id) is None:
            raise dead_url()
        task = await store.tasks.get(session.task)
        if task is None:
            raise dead_url()
        claim = Claim(
            task=task,
            traj_id=session.traj_id,
            attempt=session.attempt,
            begun=session.begun,
            owner=session.owner,
            trace_id=session.trace_id,
        )
        return Caller(session, claim)

    async def _models(self, request: Request, caller: Caller) -> Response:
        session = caller.session
        models = [_model_json(name, session) for name in session.models if not is_pattern(name)]
        return json_response({
            "object": "list", "data": models, "has_more": False,
            "first_id": models[0]["id"], "last_id": models[-1]["id"],
        })  # fmt: skip

    async def _model(self, request: Request, caller: Caller) -> Response:
        name = request.path_params["model"]
        require_model(GatewayRequest(model=name, messages=[], tools=[]), caller.session.models)
        return json_response(_model_json(name, caller.session))

    async def _count_tokens(self, request: Request, caller: Caller) -> Response:
        asked, _ = await self._read(request, MESSAGES, caller)
        require_model(asked, caller.session.models)
        return json_response({"input_tokens": await self.answerer.prompts.count_tokens(caller.claim, asked)})

    async def _reward(self, request: Request) -> Response:
        """Store a reward. Its key differs from the URL's, because the scored program knows that one."""
        store = self.answerer.store

        async def answer() -> Response:
            caller = await self._caller(request, checks_known=True)
            require_reward_key(request, caller.session)
            body = load_body(await read_body(request, self.config))
            reward = await read_reward(store, caller.claim.record_id, body)
            try:
                await store.records.keep(caller.claim, reported_reward=reward)
            except LeaseLostError as error:
                raise dead_url() from error
            return json_response({"status": "stored"})

        return await answer_errors(_shape_of(request), answer)


async def answer_errors(shape: Dialect, handle: Callable[[], Awaitable[Response]]) -> Response:
    """Return the response of ``handle``, or its error as ``shape`` has it."""
    try:
        return await handle()
    except ClientDisconnect:
        return Response(status_code=499)
    except GatewayError as error:
        refused = error
    except StoreUnavailableError as error:
        refused = GatewayError("unavailable", error.message, code="unavailable")
    except RunMissingError as error:
        refused = GatewayError("not_found", error.message, code="no_run", hint=error.hint)
    except AgentRLError as error:
        logger.warning("a request was refused", extra={"why": error.message})
        refused = GatewayError("internal", error.message, code="internal")
    return json_response(shape.error(refused), refused.status, refused.headers)


async def read_body(request: Request, config: GatewayConfig) -> bytes:
    """Return the body of a request. Raises GatewayError if it is too large, or does not arrive in time."""
    limit = int(config.gateway_body_mb * 2**20)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.gateway_timeout_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError as error:
        raise GatewayError(
            "timeout",
            f"the body did not arrive within {config.gateway_timeout_seconds:g} s",
            code="body_timeout",
        ) from error
    return b"".join(parts)


def _shape_of(request: Request) -> Dialect:
    """Return the dialect in which the client of a route that several APIs have reads errors."""
    is_anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.url.path
    return MESSAGES if is_anthropic else CHAT


def given_keys(request: Request) -> dict[str, str]:
    """Return {header: key} of the headers of a request that have one."""
    given = {name: request.headers.get(name, "").removeprefix("Bearer ").strip() for name in _KEY_HEADERS}
    return {name: key for name, key in given.items() if key}


def _check_keys(request: Request) -> None:
    """Raise GatewayError for a key that is not the token of the URL; it may be left out."""
    token = request.path_params["token"].encode()
    for name, key in given_keys(request).items():
        if not secrets.compare_digest(key.encode(), token):
            raise GatewayError(
                "authentication",
                f"the key in {name} is not that of this URL",
                code="wrong_key",
                hint="base URL and key belong together: use those of one trajectory",
            )


def require_reward_key(request: Request, session: GatewaySession | None) -> None:
    """Raise GatewayError unless a request has the key by which the trajectory takes rewards."""
    digest = "" if session is None else session.reward_key_digest or ""
    if not any(secrets.compare_digest(token_digest(key), digest) for key in given_keys(request).values()):
        raise GatewayError(
            "authentication",
            "a reward needs the key that the trajectory's model API does not have",
            code="wrong_key",
            hint="send it as a bearer token: reward_key of rollout.gateway()'s endpoint, feedback_key of a"
            " conversation; tasks that tests score have none (docs/gateway.md#rewards)",
        )


def token_digest(token: str) -> str:
    """Return what is stored of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def _too_large(limit: int) -> GatewayError:
    return GatewayError(
        "too_large",
        f"the body is larger than {limit / 2**20:g} MiB",
        code="body_too_large",
        hint="--gateway_body_mb sets the limit",
    )


def _model_json(name: str, session: GatewaySession) -> dict[str, Any]:
    created = session.created_at
    return {
        "id": name, "object": "model", "created": int(created.timestamp()), "owned_by": "agentrl",
        "type": "model", "display_name": name, "created_at": created.isoformat(),
    }  # fmt: skip


def json_response(
    value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return ``value`` as JSON."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


class _EventResponse(StreamingResponse):
    """A stream of events that goes on when its client has gone: an answer is generated to its end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, without the two tasks that would wait for the client's end."""
        await self.stream_response(send)


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


def listen(config: GatewayConfig) -> socket.socket:
    """Return the listening socket of a gateway. Raises ConfigError if the address is taken."""
    hint = "choose another --gateway_port, or 0 for a free one"
    return bind(config.gateway_host, config.gateway_port, "a gateway", hint=hint)


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

    async def start(self, listener: socket.socket | None = None) -> None:
        """Serve on ``listener``, or ``listen``. Raises AgentRLError if the server does not start."""
        listener, host = listener or listen(self._config), self._config.gateway_host
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
        self, claim: Claim, *, train: str, max_calls: int, takes_reward: bool = True,
        volatile: Sequence[str] = (),
    ) -> AsyncIterator[Endpoint]:  # fmt: skip
        """Open the endpoint of a trajectory; close it and store which calls are trained at the end.

        Requests that equal those of earlier owners, but for text that the patterns ``volatile`` match, get
        their answers. Raises ConfigError for an unknown rule, and LeaseLostError if the claim is lost.
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
            begun=claim.begun,
            owner=claim.owner,
            models=self._config.models,
            max_calls=max_calls,
            volatile=tuple(volatile),
            trace_id=claim.trace_id,
            reward_key_digest=None if reward_key is None else token_digest(reward_key),
        )
        url = await self._url()
        if claim.attempt > claim.first_attempt and claim.task.scorer != FEEDBACK:
            # Forget what an earlier owner's program reported: this one may end another way.
            await self._store.records.keep(claim, reported_reward=None)
        await self._store.gateways.open_session(session)
        endpoint = Endpoint(
            base_url=f"{url}/t/{token}/v1", api_key=token, model=session.models[0], reward_key=reward_key
        )
        is_over = False
        try:
            yield endpoint
            is_over = True
        except Exception as error:
            # Not after an outage: another owner goes on.
            is_over = getattr(error, "outage", None) is None
            raise
        finally:
            closed = await self._store.gateways.close_session(session.id)
            await self._app.close_session(session.id)
            await end_trajectory(self._store, claim, closed, train, endpoint.result, is_over=is_over)

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
    store: Store, claim: Claim, closed: GatewaySession | None, train: str, result: GatewayResult,
    *, is_over: bool = True,
) -> None:  # fmt: skip
    """Fill ``result`` when the base URL is closed, and store which calls the rule ``train`` leaves out.

    If the trajectory ``is_over``, calls of earlier owners for which the program has not asked again are
    dropped. Else the next owner's may yet ask for them.
    """
    result.stopped_by = None if closed is None else closed.stopped_by
    result.calls = await store.model_calls.by_record(claim.record_id)
    if claim.attempt > claim.first_attempt:
        await _note_replay(store, claim, result, is_over=is_over and result.stopped_by != "unavailable")
    kept = [call for call in result.calls if call.index not in result.dropped]
    result.messages = main_messages(kept)
    record = await store.records.get(claim.record_id)
    if record is not None and (reward := record.reported_reward) is not None:
        by_call = {int(call): value for call, value in reward.turn_rewards.items()}
        roles = reward.role_rewards or None
        result.reward = ScoreResult(reward.score, reward.details, by_call or None, roles)
    left_out = untrained(train, kept)
    await store.records.keep(
        claim, train_rule=train, untrained_calls=sorted([*left_out, *result.dropped]),
        dropped_calls=result.dropped,
        dropped_tokens=sum(result.calls[index].generated_tokens for index in result.dropped),
        **counts_of(kept),
    )  # fmt: skip
    if left_out:
        share = describe_share(kept, train, left_out)
        logger.info("a trajectory is trained in part", extra={"record": claim.record_id, "share": share})


async def _note_replay(store: Store, claim: Claim, result: GatewayResult, *, is_over: bool) -> None:
    """Find the dropped calls of a trajectory with earlier owners, and note what this one took over."""
    answered = await store.gateways.answered(claim.record_id, claim.attempt)
    dropped = dropped_calls(result.calls, answered)
    of_others = [call for call in result.calls if call.attempt != claim.attempt]
    taken = [call for call in of_others if call.index not in dropped]
    result.dropped = tuple(dropped) if is_over else ()
    await store.records.note(
        claim, replayed=len(taken), tokens=sum(call.generated_tokens for call in taken),
        diverged_at=min(result.dropped, default=None), dropped=len(result.dropped),
    )  # fmt: skip
    if result.dropped:
        logger.warning(
            "a program went another way than before; what it has not asked for again is dropped",
            extra={"record": claim.record_id, "diverged_at": result.dropped[0], "dropped": len(dropped)},
        )


def main_messages(calls: Sequence[DispatchedSamplingTask]) -> list[dict[str, object]]:
    """Return the conversation of the main branch."""
    main = main_branch(branches_of(of_main_role(calls)))
    if main is None:
        return []
    return chain_of({call.id: call for call in calls}, main.calls[-1].id).messages


def parse_body(dialect: Dialect, body: bytes) -> GatewayRequest:
    """Return the request of a body. Raises GatewayError for what is wrong with it."""
    try:
        return dialect.parse(load_body(body))
    except RecursionError as error:  # a value of a thousand levels where a name is expected
        raise invalid("the body is nested too deeply") from error
