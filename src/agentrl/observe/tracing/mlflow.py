"""Send spans to the OTLP endpoint of an MLflow server (3.6 or newer); the package mlflow is not needed."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Mapping, Sequence
from urllib.parse import quote

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = logging.getLogger("opentelemetry.exporter.mlflow")
"""Below the loggers whose messages ``Sender`` collects."""

_API = "/api/2.0/mlflow/experiments"


class MlflowExporter(SpanExporter):
    """Exports to one experiment, which is looked up, or created, with the first batch that MLflow takes."""

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
            except (requests.RequestException, LookupError, ValueError) as error:
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
        found = requests.get(
            f"{self._url}{_API}/get-by-name?experiment_name={quote(name, safe='')}",
            headers=self._headers, timeout=self._timeout,
        )  # fmt: skip
        if found.status_code == requests.codes.not_found:
            made = requests.post(
                f"{self._url}{_API}/create", json={"name": name}, headers=self._headers, timeout=self._timeout
            )
            if made.ok:
                return str(made.json()["experiment_id"])
            found = requests.get(found.url, headers=self._headers, timeout=self._timeout)  # another made it
        found.raise_for_status()
        return str(found.json()["experiment"]["experiment_id"])


def login_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the header with MLFLOW_TRACKING_TOKEN, or with MLFLOW_TRACKING_USERNAME and …_PASSWORD."""
    token = environment.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return {"authorization": f"Bearer {token}"}
    user, password = (environment.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    if not user:
        return {}
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
