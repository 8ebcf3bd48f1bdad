"""Trace a process as ``--trace`` says: where its spans go, and what of their content they hold."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from agentrl.base.installation import how_to_install
from agentrl.base.spans import Tracer, use_tracer
from agentrl.config.load import Configs
from agentrl.config.schema import ModelConfig, RunConfig, TraceConfig
from agentrl.errors import ConfigError
from agentrl.observe.logging import describe_process_id, redact, redact_and_cut

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
        # Not at the top: a plain installation has no SDK, and every command comes through here.
        from agentrl.observe.span_exporters import Sender
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--trace needs OpenTelemetry, which is not installed ({error})",
            hint=how_to_install("tracing"),
        ) from error
    resource = {
        "service.name": f"agentrl-{role}",
        "service.instance.id": describe_process_id(),
        "agentrl.run": configs[RunConfig].run_name,
    }
    sender = Sender(exporter, str(destination), flags.trace_queue)
    renders = {"render": render, "render_messages": render_messages} if flags.trace_content else {}
    opened = Tracer(sender.tracer(resource), policy=configs[ModelConfig].model_name, **renders)
    logger.info("spans go to %s%s", destination, " with content" if flags.trace_content else "")
    try:
        with use_tracer(opened):
            yield
    finally:
        sender.close(FLUSH_SECONDS)


def _exporter(destination: Destination) -> SpanExporter:
    if destination.protocol == "mlflow":
        from agentrl.observe.span_exporters import MlflowExporter

        return MlflowExporter(destination.url, destination.experiment, timeout=EXPORT_SECONDS)
    if destination.protocol == "sqlite":
        from agentrl.observe.span_exporters import MlflowFileExporter

        return MlflowFileExporter(destination.url, destination.experiment)
    if destination.protocol == "http":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=destination.url, timeout=EXPORT_SECONDS)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

    insecure = destination.url.startswith("http://")
    return Grpc(endpoint=destination.url, insecure=insecure, timeout=EXPORT_SECONDS)


Protocol = Literal["grpc", "http", "mlflow", "sqlite"]

_FORMS = "use otlp://HOST:PORT, http://HOST:PORT, mlflow, mlflow://HOST:PORT/EXPERIMENT or sqlite:///FILE"
_SCHEMES: Mapping[str, tuple[Protocol, str]] = {
    "otlp": ("grpc", "http"),
    "otlps": ("grpc", "https"),
    "http": ("http", "http"),
    "https": ("http", "https"),
    "mlflow": ("mlflow", "http"),
    "mlflows": ("mlflow", "https"),
}
_SQLITE = "sqlite:///"
_PORTS: Mapping[str, int] = {"grpc": 4317, "http": 4318, "mlflow": 5000}
_TRACES_PATH = "/v1/traces"
EXPERIMENT = "agentrl"
"""The experiment of MLflow, as for ``--report_to mlflow``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where spans go: ``url`` is an endpoint of OTLP, the base URL of an MLflow server or its SQLite file."""

    protocol: Protocol
    url: str
    experiment: str = EXPERIMENT

    def __str__(self) -> str:
        return f"MLflow at {self.url}" if self.protocol in ("mlflow", "sqlite") else self.url


def read_destination(value: str, environment: Mapping[str, str] = os.environ) -> Destination:
    """Return the destination that ``--trace`` names. Raises ConfigError."""
    if value == "mlflow":
        return _mlflow_of(environment)
    if value.startswith(_SQLITE):
        return Destination(protocol="sqlite", url=value, experiment=_experiment("", environment))
    parts = urlsplit(value)
    if parts.scheme not in _SCHEMES:
        raise ConfigError(f"--trace is {redact(value)!r}", hint=_FORMS)
    protocol, scheme = _SCHEMES[parts.scheme]
    base = _base(parts, scheme, _PORTS[protocol], "--trace")
    if protocol == "mlflow":
        return Destination(protocol=protocol, url=base, experiment=_experiment(parts.path, environment))
    if protocol == "grpc":
        if parts.path.strip("/"):
            raise ConfigError(f"--trace is {value!r}, and OTLP over gRPC has no path", hint=_FORMS)
        return Destination(protocol=protocol, url=base)
    path = parts.path.rstrip("/").removesuffix(_TRACES_PATH)
    return Destination(protocol=protocol, url=f"{base}{path}{_TRACES_PATH}")


def _mlflow_of(environment: Mapping[str, str]) -> Destination:
    name = "MLFLOW_TRACKING_URI"
    uri = environment.get(name, "")
    if uri.startswith(_SQLITE):
        return Destination(protocol="sqlite", url=uri, experiment=_experiment("", environment))
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        problem = f"is {parts.scheme}:…, which is neither" if uri else "is not set"
        raise ConfigError(
            f"--trace mlflow needs an MLflow server or sqlite:///FILE, and {name} {problem}",
            hint="start `mlflow server`, and give --trace mlflow://127.0.0.1:5000; or --trace sqlite:///mlflow.db",
        )
    base = _base(parts, parts.scheme, 443 if parts.scheme == "https" else 80, name) + parts.path.rstrip("/")
    return Destination(protocol="mlflow", url=base, experiment=_experiment("", environment))


def _experiment(path: str, environment: Mapping[str, str]) -> str:
    return unquote(path.strip("/")) or environment.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT


def _base(parts: SplitResult, scheme: str, port: int, name: str) -> str:
    """Return scheme, host and port. Refuses secrets: the flag is stored with the run and logged."""
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"{name} holds a user name, a password or a query",
            hint="give secrets as headers: OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer%20…', or"
            " MLFLOW_TRACKING_TOKEN",
        )
    try:
        host, given = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{name} has no valid port: {error}", hint=_FORMS) from error
    if not host:
        raise ConfigError(f"{name} names no host", hint=_FORMS)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{given or port}"


TEXT_LIMIT = 4096
"""Characters of one text in a span."""
_FIRST, _LAST = 8, 24
"""Messages of one attribute: the first ones and the last ones."""


def render(value: Any) -> str:
    """Return a text, or anything else as JSON, redacted and cut."""
    return _cut(value if isinstance(value, str) else _json(value))


def render_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages as JSON: a role and parts each. Of a long list, the middle is left out."""
    shown = list(messages)
    if len(shown) > _FIRST + _LAST:
        missing = len(shown) - _FIRST - _LAST
        note = {"role": "system", "content": f"[cut: {missing} more messages]"}
        shown = [*shown[:_FIRST], note, *shown[-_LAST:]]
    return _json([_message(message) for message in shown])


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = str(message.get("role", "assistant"))
    texts = _texts(message.get("content"))
    if role == "tool":
        response = "\n".join(text["content"] for text in texts if "content" in text)
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": response}
        return {"role": role, "parts": [part]}
    parts: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": _cut(str(message["reasoning_content"]))})
    parts += texts
    parts += [_tool_call(call) for call in message.get("tool_calls") or ()]
    return {"role": role, "parts": parts}


def _texts(content: object) -> list[dict[str, Any]]:
    """Return the parts of a content. An image or a file is named by its type only."""
    if not isinstance(content, list):
        return [{"type": "text", "content": _cut(str(content))}] if content else []
    return [
        {"type": "text", "content": _cut(str(part["text"]))}
        if isinstance(part, Mapping) and "text" in part
        else {"type": str(part.get("type", "unknown")) if isinstance(part, Mapping) else "unknown"}
        for part in content
    ]


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else _json(arguments)
    return {"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": _cut(text)}


def _cut(text: str) -> str:
    return redact_and_cut(text, TEXT_LIMIT)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
