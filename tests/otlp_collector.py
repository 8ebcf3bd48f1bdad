"""A small OpenTelemetry collector over HTTP: decodes what it gets and keeps it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentrl.config.load import Configs, parse
from agentrl.observe.tracing import tracing


@dataclass(frozen=True, kw_only=True)
class SeenSpan:
    """One span, decoded."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    failed: bool
    status: str
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]
    links: list[str]
    begin: int
    end: int
    resource: dict[str, Any]


@dataclass
class Collector:
    """The spans that came, in order; ``url`` goes to ``--trace``."""

    url: str = ""
    spans: list[SeenSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        """Keep the spans of a request."""
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(group.resource.attributes)
            self.spans += [_seen(span, resource) for scope in group.scope_spans for span in scope.spans]

    def named(self, start: str) -> list[SeenSpan]:
        """Return the spans whose names begin so, by their beginning."""
        return sorted((each for each in self.spans if each.name.startswith(start)), key=lambda s: s.begin)

    def one(self, start: str) -> SeenSpan:
        """Return the only span whose name begins so."""
        (found,) = self.named(start)
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.headers.append(dict(self.headers))
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def trace_flags(url: str | None, *flags: str) -> Configs:
    """Return the flags of a process that traces to ``url``, or not at all."""
    where = () if url is None else ("--trace", url)
    return parse(["--run_name", "traced", *where, *flags], command="test", description="", shown=[])


@contextmanager
def traced(*flags: str) -> Iterator[Collector]:
    """Trace this process within the block; behind it, the collector has all spans."""
    with collecting() as collector, tracing(trace_flags(collector.url, *flags), "test"):
        yield collector


def _seen(span: Any, resource: dict[str, Any]) -> SeenSpan:
    return SeenSpan(
        name=span.name, trace=span.trace_id.hex(), id=span.span_id.hex(), parent=span.parent_span_id.hex(),
        kind=span.kind, failed=span.status.code == 2, status=span.status.message,
        attributes=_values(span.attributes),
        events={event.name: _values(event.attributes) for event in span.events},
        links=[link.trace_id.hex() for link in span.links], begin=span.start_time_unix_nano,
        end=span.end_time_unix_nano, resource=resource,
    )  # fmt: skip


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(item) for item in found.values] if kind == "array_value" else found
