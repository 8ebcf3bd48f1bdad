"""Read ``--trace``: the protocol and the address to which spans go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit

from agentrl.errors import ConfigError
from agentrl.observe.redact import redact

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
        found = f"is {parts.scheme}:…, which is neither" if uri else "is not set"
        raise ConfigError(
            f"--trace mlflow needs an MLflow server or sqlite:///FILE, and {name} {found}",
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
