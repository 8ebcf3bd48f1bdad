"""Flags of tracing: where spans go, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.fields import Flags, flag


@dataclass(frozen=True, kw_only=True)
class TraceConfig(Flags):
    """OpenTelemetry traces."""

    section = "tracing"

    trace: str | None = flag(
        None,
        "where spans go: otlp://HOST:PORT (OTLP over gRPC; otlps:// with TLS), http://HOST:PORT or https://"
        " (OTLP over HTTP), mlflow (the server of MLFLOW_TRACKING_URI), mlflow://HOST:PORT/EXPERIMENT or"
        " sqlite:///FILE (MLflow without a server; default: nowhere)",
        per_process=True,
    )
    trace_content: bool = flag(
        False,
        "record messages, arguments, results and error messages in spans, redacted and cut",
        per_process=True,
    )
    trace_queue: int = flag(
        4096,
        "spans that wait to be sent; further ones are dropped",
        within="[1, inf)",
        unit="spans",
        per_process=True,
    )
