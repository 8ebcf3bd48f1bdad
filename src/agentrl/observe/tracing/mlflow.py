"""Send spans to MLflow 3.6 or newer: to the OTLP endpoint of a server, or into a SQLite file without one."""

from __future__ import annotations

import base64
import importlib.util
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx2
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agentrl.errors import ConfigError

logger = logging.getLogger("opentelemetry.exporter.mlflow")
"""Below the loggers whose messages ``Sender`` collects."""

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
                logger.error("no experiment: %s", error)
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
        name = self._experiment
        asked = f"{self._url}{_API}/get-by-name?experiment_name={quote(name, safe='')}"
        with httpx2.Client(headers=self._headers, timeout=self._timeout, follow_redirects=True) as http:
            found = http.get(asked)
            if found.status_code == httpx2.codes.NOT_FOUND:
                made = http.post(f"{self._url}{_API}/create", json={"name": name})
                if made.is_success:
                    return str(made.json()["experiment_id"])
                found = http.get(asked)  # another made it
        found.raise_for_status()
        return str(found.json()["experiment"]["experiment_id"])


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
            logger.error("%s", error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing: every batch is written when ``export`` returns."""


def _experiment_in(uri: str, name: str) -> str:
    """Return the id of an experiment, which is created if it is missing."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another process made it
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def login_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the header with MLFLOW_TRACKING_TOKEN, or with MLFLOW_TRACKING_USERNAME and …_PASSWORD."""
    token = environment.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return {"authorization": f"Bearer {token}"}
    user, password = (environment.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    if not user:
        return {}
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
