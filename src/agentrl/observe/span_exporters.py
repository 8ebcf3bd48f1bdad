"""Send spans: a queue beside the program, and the exporters to MLflow. Needs the packages of ``tracing``."""

from __future__ import annotations

import base64
import importlib.util
import logging
import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from agentrl.base.proxies import blocking_transport
from agentrl.base.spans import ROOT_BITS
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry import trace as api

logger = logging.getLogger(__name__)
_exporter_logger = logging.getLogger("opentelemetry.exporter.mlflow")
"""Below the loggers whose messages ``Sender`` collects."""

_BATCH = 256
_SEND_SECONDS = 1.0
"""Interval at which spans are sent."""
_LIBRARIES = ("opentelemetry.exporter", "opentelemetry.sdk")


class Sender(SpanProcessor):
    """Queues ended spans and sends them in batches. A span that does not fit into the queue is dropped.

    A collector that is away is logged once, and once more when it is back. Its spans are lost. The SDK's
    BatchSpanProcessor would log each of them, and hold the end of a process up for as long as retries take.
    """

    def __init__(self, exporter: SpanExporter, where: str, limit: int) -> None:
        """Send to ``exporter``; ``where`` names it in messages, ``limit`` is the length of the queue."""
        self._exporter = exporter
        self._where = where
        self._limit = limit
        self._queue: deque[ReadableSpan] = deque()
        self._woken = threading.Event()
        self._ending = False
        self._gives_up = False
        self._is_away = False
        self._reason = _LastMessage()
        self.sent = self.lost = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def tracer(self, resource: Mapping[str, str]) -> api.Tracer:
        """Return a tracer whose ended spans come here; ``resource`` describes this process."""
        # not the global provider: what a user's own code traces in this process stays apart
        described = Resource.create(dict(resource))
        provider = TracerProvider(resource=described, id_generator=_Ids(), shutdown_on_exit=False)
        provider.add_span_processor(self)
        return provider.get_tracer("agentrl")

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span. Never blocks."""
        if len(self._queue) >= self._limit or self._ending:
            self.lost += 1
            return
        self._queue.append(span)
        if len(self._queue) >= _BATCH:
            self._woken.set()

    def close(self, seconds: float) -> None:
        """Send what is queued within ``seconds``, or one second if nobody answered last time.

        Logs how many spans are lost.
        """
        self._ending = True
        seconds = min(seconds, 1.0) if self._is_away else seconds
        self._woken.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._gives_up = True
        self._exporter.shutdown()
        self._thread.join(1.0)
        self.lost += len(self._queue)
        self._queue.clear()
        if self.lost:
            logger.warning("%d spans were lost, %d were sent to %s", self.lost, self.sent, self._where)

    def _run(self) -> None:
        with _captured(self._reason):
            while not self._ending:
                self._woken.wait(_SEND_SECONDS)
                self._woken.clear()
                self._send_all()
            self._send_all()

    def _send_all(self) -> None:
        while self._queue and not self._gives_up:
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            try:
                done = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception as error:  # noqa: BLE001  a fault of the library must not end the thread
                self._reason.text = f"{type(error).__name__}: {error}"
                done = False
            self._count(len(batch), done)

    def _count(self, spans: int, done: bool) -> None:
        if done:
            self.sent += spans
            if self._is_away:
                logger.info("spans are sent to %s again; %d were lost", self._where, self.lost)
        else:
            self.lost += spans
            if not self._is_away:
                logger.warning(
                    "spans cannot be sent to %s, and are lost until it answers; nothing waits for them: %s",
                    self._where, self._reason.text or "no reason is known",
                )  # fmt: skip
        self._is_away = not done


class _Ids(RandomIdGenerator):
    """Gives the root of a trace the last half of the trace's id, so that the trace's id names its root."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def generate_trace_id(self) -> int:
        """Return a new id; the next span of this thread is the root."""
        made = super().generate_trace_id()
        while not made & ROOT_BITS:
            made = super().generate_trace_id()
        self._of_thread.root = made & ROOT_BITS
        return made

    def generate_span_id(self) -> int:
        """Return the id of a root if its trace was begun just now, else a new one."""
        root: int | None = getattr(self._of_thread, "root", None)
        self._of_thread.root = None
        return super().generate_span_id() if root is None else root


class _LastMessage(logging.Handler):
    """Keeps the last message of the exporting libraries, which would log each failure."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.text = record.getMessage()[:300]


@contextmanager
def _captured(handler: logging.Handler) -> Iterator[None]:
    """Send the messages of the exporting libraries to ``handler`` only."""
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    for each in loggers:
        each.addHandler(handler)
        each.propagate = False
    try:
        yield
    finally:
        for each in loggers:
            each.removeHandler(handler)
            each.propagate = True


_API = "/api/2.0/mlflow/experiments"


class MlflowExporter(SpanExporter):
    """Exports to one experiment of a server; the package mlflow is not needed.

    The experiment is looked up, or created, with the first batch that MLflow takes.
    """

    def __init__(self, url: str, experiment: str, *, timeout: float) -> None:
        """``url`` is the server's; ``timeout`` limits one request and one batch, in seconds."""
        self._url = url
        self._experiment = experiment
        self._timeout = timeout
        self._headers = login_headers(os.environ)
        self._exporter: OTLPSpanExporter | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        if self._exporter is None:
            try:
                self._exporter = self._open()
            except (httpx2.HTTPError, LookupError, ValueError) as error:
                _exporter_logger.error("no experiment: %s", error)
                return SpanExportResult.FAILURE
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        """End retries."""
        if self._exporter is not None:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _open(self) -> OTLPSpanExporter:
        headers = {**self._headers, "x-mlflow-experiment-id": self._experiment_id()}
        return OTLPSpanExporter(endpoint=f"{self._url}/v1/traces", headers=headers, timeout=self._timeout)

    def _experiment_id(self) -> str:
        get = f"{self._url}{_API}/get-by-name?experiment_name={quote(self._experiment, safe='')}"
        with httpx2.Client(
            headers=self._headers,
            timeout=self._timeout,
            follow_redirects=True,
            transport=blocking_transport(self._url),
        ) as client:
            answer = client.get(get)
            if answer.status_code == httpx2.codes.NOT_FOUND:
                made = client.post(f"{self._url}{_API}/create", json={"name": self._experiment})
                if made.is_success:
                    return str(made.json()["experiment_id"])
                answer = client.get(get)  # another process made it
        answer.raise_for_status()
        return str(answer.json()["experiment"]["experiment_id"])


class MlflowFileExporter(SpanExporter):
    """Writes to one experiment of a SQLite file, as the server does with what it receives."""

    def __init__(self, uri: str, experiment: str) -> None:
        """Open the file ``uri`` (``sqlite:///PATH``), or create it in some seconds. Raises ConfigError."""
        if importlib.util.find_spec("mlflow") is None:
            raise ConfigError(
                f"--trace writes to {uri} by the package mlflow, which is not installed",
                hint="pip install 'mlflow>=3.6', or give an MLflow server: --trace mlflow://HOST:PORT",
            )
        from mlflow.exceptions import MlflowException
        from mlflow.tracing.client import TracingClient

        try:
            self._experiment = _experiment_in(uri, experiment)
            self._client = TracingClient(uri)
        except MlflowException as error:
            raise ConfigError(
                f"--trace {uri} cannot be opened: {error}", hint="give a file in a folder"
            ) from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write a batch."""
        from mlflow.entities import Span
        from mlflow.exceptions import MlflowException
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

        traces: dict[str, list[Any]] = defaultdict(list)
        for resource in encode_spans(spans).resource_spans:
            for scope in resource.scope_spans:
                for encoded in scope.spans:
                    span = Span.from_otel_proto(encoded)
                    traces[span.trace_id].append(span)
        try:
            for of_trace in traces.values():
                self._client.log_spans(self._experiment, of_trace)
        except MlflowException as error:
            _exporter_logger.error("%s", error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing: every batch is written when ``export`` returns."""


def _experiment_in(uri: str, name: str) -> str:
    """Return the id of an experiment, which is created if it is missing."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another process made it
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return str(experiment.experiment_id)


def login_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the header with MLFLOW_TRACKING_TOKEN, or with MLFLOW_TRACKING_USERNAME and …_PASSWORD."""
    token = environment.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return {"authorization": f"Bearer {token}"}
    user, password = (environment.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    if not user:
        return {}
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
