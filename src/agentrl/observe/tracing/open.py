"""Open the tracer that ``--trace`` names, and close it with a bounded wait."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentrl.config.load import Configs
from agentrl.config.schema import ModelConfig, RunConfig, TraceConfig
from agentrl.errors import ConfigError
from agentrl.observe.logging import describe_process_id
from agentrl.observe.tracing.destination import Destination, read_destination
from agentrl.spans import use_tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

EXPORT_SECONDS = 10.0
"""Time limit of one batch, with its retries."""
FLUSH_SECONDS = 10.0
"""How long the end of a process waits until its last spans are sent."""


@contextmanager
def tracing(configs: Configs, role: str) -> Iterator[None]:
    """Trace this process as ``--trace`` says, within the block. Without the flag, do nothing.

    Raises ConfigError for an address that cannot be used, and if the packages are not installed.
    """
    flags = configs[TraceConfig]
    if flags.trace is None:
        yield
        return
    destination = read_destination(flags.trace)
    try:
        exporter = _exporter(destination)
        from agentrl.observe.tracing.sender import Sender
        from agentrl.observe.tracing.tracer import OtelTracer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--trace needs OpenTelemetry, which is not installed ({error})",
            hint="pip install 'agentrl[tracing]', or pip install -r requirements/tracing.txt",
        ) from error
    resource = {
        "service.name": f"agentrl-{role}",
        "service.instance.id": describe_process_id(),
        "agentrl.run": configs[RunConfig].run_name,
    }
    sender = Sender(exporter, str(destination), flags.trace_queue)
    opened = OtelTracer(sender, resource, policy=configs[ModelConfig].model_name, content=flags.trace_content)
    logger.info("spans go to %s%s", destination, " with content" if flags.trace_content else "")
    try:
        with use_tracer(opened):
            yield
    finally:
        sender.close(FLUSH_SECONDS)


def _exporter(destination: Destination) -> SpanExporter:
    if destination.protocol == "mlflow":
        from agentrl.observe.tracing.mlflow import MlflowExporter

        return MlflowExporter(destination.url, destination.experiment, timeout=EXPORT_SECONDS)
    if destination.protocol == "sqlite":
        from agentrl.observe.tracing.mlflow import MlflowFileExporter

        return MlflowFileExporter(destination.url, destination.experiment)
    if destination.protocol == "http":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=destination.url, timeout=EXPORT_SECONDS)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

    insecure = destination.url.startswith("http://")
    return Grpc(endpoint=destination.url, insecure=insecure, timeout=EXPORT_SECONDS)
