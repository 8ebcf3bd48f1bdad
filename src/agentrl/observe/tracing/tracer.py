"""Record spans with the OpenTelemetry SDK, without its global provider."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from opentelemetry import context as contexts
from opentelemetry import trace as api
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from agentrl.errors import FailureError
from agentrl.observe.tracing.content import render, render_messages
from agentrl.spans import Attributes, Kind, Span, Tracer, Value

_KINDS: Mapping[Kind, api.SpanKind] = {"internal": api.SpanKind.INTERNAL, "client": api.SpanKind.CLIENT}
_LOW = 2**64 - 1


class OtelTracer(Tracer):
    """Records spans and gives them to a processor when they end."""

    is_recording = True

    def __init__(
        self, processor: SpanProcessor, resource: Mapping[str, str], *, policy: str, content: bool
    ) -> None:
        """``resource`` describes this process; ``content`` records messages, arguments and results."""
        self.policy = policy
        self._content = content
        self._provider = TracerProvider(
            resource=Resource.create(dict(resource)), id_generator=_Ids(), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("agentrl")

    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        trace: str | None = None,
        root: bool = False,
        begin: float | None = None,
        links: Sequence[str] = (),
    ) -> Span:
        """Return a new span."""
        parent = None
        if root:
            parent = contexts.Context()
        elif trace is not None:
            parent = api.set_span_in_context(api.NonRecordingSpan(_root_of(trace)), contexts.Context())
        return self._start(name, attributes, parent, _KINDS[kind], begin, links)

    def _start(
        self,
        name: str,
        attributes: Attributes | None,
        parent: contexts.Context | None,
        kind: api.SpanKind = api.SpanKind.INTERNAL,
        begin: float | None = None,
        links: Sequence[str] = (),
    ) -> OtelSpan:
        started = self._tracer.start_span(
            name,
            context=parent,
            kind=kind,
            attributes=_present(attributes or {}),
            start_time=None if begin is None else _nanoseconds(begin),
            links=[api.Link(_root_of(each)) for each in links],
        )
        return OtelSpan(self, started, self._content)


class OtelSpan(Span):
    """A span of the SDK."""

    is_recording = True

    def __init__(self, tracer: OtelTracer, span: api.Span, content: bool) -> None:
        self._tracer = tracer
        self._span = span
        self._content = content
        self._token: Any = None
        if span.get_span_context().trace_flags.sampled:
            self.trace_id = api.format_trace_id(span.get_span_context().trace_id)

    def __enter__(self) -> Self:
        self._token = contexts.attach(api.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the span. A cancelled one is not failed, but ``agentrl.cancelled``."""
        contexts.detach(self._token)
        if isinstance(error, asyncio.CancelledError):
            self._span.set_attribute("agentrl.cancelled", True)
        elif isinstance(error, Exception):
            named = error.kind if isinstance(error, FailureError) else type(error).__name__
            self.fail(named, str(error))
        self._span.end()

    def set(self, attributes: Attributes) -> None:
        """Set attributes."""
        self._span.set_attributes(_present(attributes))

    def event(self, name: str, attributes: Attributes) -> None:
        """Add an event."""
        self._span.add_event(name, _present(attributes))

    def content(self, name: str, value: Callable[[], Any]) -> None:
        """Set a text, redacted and cut."""
        if self._content and (found := value()) is not None:
            self._span.set_attribute(name, render(found))

    def messages(self, name: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Set messages, redacted and cut."""
        if self._content:
            self._span.set_attribute(name, render_messages(messages))

    def phase(self, name: str, begin: float, end: float, attributes: Attributes | None = None) -> Span:
        """Add a child that has ended."""
        child = self._tracer._start(name, attributes, api.set_span_in_context(self._span), begin=begin)
        child._span.end(_nanoseconds(end))
        return child

    def fail(self, kind: str, message: str = "") -> None:
        """Mark the span as failed."""
        self._span.set_attribute("error.type", kind)
        shown = render(message) if self._content and message else None
        self._span.set_status(api.Status(api.StatusCode.ERROR, shown))


class _Ids(RandomIdGenerator):
    """Gives the root of a trace the last half of the trace's id, so that the trace's id names its root."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def generate_trace_id(self) -> int:
        """Return a new id; the next span of this thread is the root."""
        found = super().generate_trace_id()
        while not found & _LOW:
            found = super().generate_trace_id()
        self._of_thread.root = found & _LOW
        return found

    def generate_span_id(self) -> int:
        """Return the id of a root if its trace was begun just now, else a new one."""
        root: int | None = getattr(self._of_thread, "root", None)
        self._of_thread.root = None
        return super().generate_span_id() if root is None else root


def _root_of(trace_id: str) -> api.SpanContext:
    number = int(trace_id, 16)
    return api.SpanContext(number, number & _LOW, is_remote=True, trace_flags=api.TraceFlags(1))


def _present(attributes: Attributes) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
