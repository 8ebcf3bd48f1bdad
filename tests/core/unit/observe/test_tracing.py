"""Where spans go, what they hold, and what happens when nobody takes them."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from otlp_collector import Collector, trace_flags, traced

from agentrl.base.spans import NO_SPAN, Tracer, tracer, use_tracer
from agentrl.errors import ConfigError, EngineError
from agentrl.observe.span_exporters import MlflowFileExporter, Sender, login_headers
from agentrl.observe.tracing import (
    TEXT_LIMIT,
    Destination,
    read_destination,
    render,
    render_messages,
    tracing,
)


@pytest.mark.parametrize(
    ("flag", "protocol", "url"),
    [
        ("otlp://collector", "grpc", "http://collector:4317"),
        ("otlps://collector:99", "grpc", "https://collector:99"),
        ("http://[::1]:4318", "http", "http://[::1]:4318/v1/traces"),
        ("https://host/api/otel/", "http", "https://host:4318/api/otel/v1/traces"),
        ("http://host:1/v1/traces", "http", "http://host:1/v1/traces"),
        ("mlflow://host", "mlflow", "http://host:5000"),
        ("mlflows://host:443/my%20runs", "mlflow", "https://host:443"),
    ],
)
def test_the_address_names_protocol_and_endpoint(flag: str, protocol: str, url: str) -> None:
    found = read_destination(flag, {})
    assert (found.protocol, found.url) == (protocol, url)
    assert found.experiment == ("my runs" if "my" in flag else "agentrl")


def test_mlflow_alone_is_the_server_of_its_environment() -> None:
    environment = {"MLFLOW_TRACKING_URI": "https://mlflow.example/base/", "MLFLOW_EXPERIMENT_NAME": "mine"}
    assert read_destination("mlflow", environment) == Destination(
        protocol="mlflow", url="https://mlflow.example:443/base", experiment="mine"
    )
    for uri in ("", "postgresql://host/mlflow"):
        with pytest.raises(ConfigError, match=r"needs an MLflow server.*\n.*mlflow://127.0.0.1:5000"):
            read_destination("mlflow", {"MLFLOW_TRACKING_URI": uri})
    file = Destination(protocol="sqlite", url="sqlite:///a.db", experiment="mine")
    named = {"MLFLOW_TRACKING_URI": "sqlite:///a.db", "MLFLOW_EXPERIMENT_NAME": "mine"}
    assert read_destination("mlflow", named) == read_destination("sqlite:///a.db", named) == file


def test_a_file_of_mlflow_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="package mlflow, which is not installed"):
        MlflowFileExporter("sqlite:///a.db", "mine")
    assert login_headers({"MLFLOW_TRACKING_TOKEN": "t"}) == {"authorization": "Bearer t"}
    both = {"MLFLOW_TRACKING_USERNAME": "u", "MLFLOW_TRACKING_PASSWORD": "p"}
    assert login_headers(both) == {"authorization": "Basic dTpw"}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("collector:4317", "--trace is 'collector:4317'"),
        ("grpc://me:hunter2@host", "use otlp://HOST:PORT"),
        ("otlp://host/path", "has no path"),
        ("http://", "names no host"),
        ("http://host:99999", "no valid port"),
        ("http://me:hunter2@host", "holds a user name, a password or a query"),
        ("https://host/?token=hunter2", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_and_no_secret_shown(flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_destination(flag, {})
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_without_the_flag_nothing_is_imported_and_spans_are_one_object() -> None:
    with tracing(trace_flags(None), "test"):
        assert not tracer().is_recording
        with tracer().span("anything", {"a": 1}) as span:
            assert span is NO_SPAN
            assert span.trace_id is None
        assert span.phase("part", 0, 1) is NO_SPAN


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    says = r"needs OpenTelemetry.*\n.*requirements/tracing\.txt"
    with pytest.raises(ConfigError, match=says), _opened("http://h"):
        pass


def test_content_is_recorded_only_if_asked_for() -> None:
    messages = [{"role": "user", "content": "my question"}]
    for flags, is_there in (((), False), (("--trace_content", "true"), True)):
        with traced(*flags) as collector, tracer().span("chat") as span:
            span.messages("gen_ai.input.messages", messages)
            span.content("gen_ai.tool.call.arguments", lambda: {"q": "my question"})
            span.fail("engine", "my question failed")
        seen = collector.one("chat")
        assert ("my question" in str(seen)) is is_there
        assert (seen.failed, seen.attributes["error.type"]) == (True, "engine")


def test_texts_are_redacted_and_cut_and_stay_json() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"password": "hunter2hunter2", "n": 1}}}
    image = {"type": "image_url", "image_url": "b64"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "x" * 3 * TEXT_LIMIT},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "token sk-abcdefghijklmnopqrstuvwx"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
    ]
    rendered = render_messages(messages)
    assert "hunter2" not in rendered
    assert "sk-abc" not in rendered
    assert "b64" not in rendered
    system, assistant, tool, user = json.loads(rendered)
    assert len(system["parts"][0]["content"]) < TEXT_LIMIT + 60
    assert [part["type"] for part in assistant["parts"]] == ["reasoning", "tool_call"]
    assert tool["parts"][0] == {"type": "tool_call_response", "id": "c", "response": "token ***"}
    assert [part["type"] for part in user["parts"]] == ["text", "image_url"]
    many = json.loads(render_messages([{"role": "user", "content": str(i)} for i in range(100)]))
    assert len(many) == 33
    assert "68 more messages" in many[8]["parts"][0]["content"]
    assert render({"api_key": "abcdefgh12345678"}) == '{"api_key": "***"}'


async def test_a_trace_id_names_its_root_for_any_process() -> None:
    with traced() as collector:
        with tracer().span("outer"), tracer().span("root", root=True) as root:
            trace = root.trace_id
            await asyncio.create_task(_child())
        with tracer().span("later", trace=trace):
            pass
    seen = collector.one("root")
    assert (seen.trace, seen.parent, seen.id) == (trace, "", trace[16:])
    assert collector.one("child").parent == collector.one("later").parent == seen.id
    assert collector.one("outer").trace != trace
    assert seen.resource["service.name"] == "agentrl-test"
    assert seen.resource["agentrl.run"] == "traced"


async def test_failures_are_named_and_cancelled_spans_are_not_failures() -> None:
    with traced() as collector:
        with pytest.raises(EngineError), tracer().span("a"):
            raise EngineError("down")
        with pytest.raises(ValueError, match="b"), tracer().span("b"):
            raise ValueError("b")
        with pytest.raises(asyncio.CancelledError), tracer().span("c"):
            raise asyncio.CancelledError
    assert collector.one("a").attributes == {"error.type": "engine"}
    assert collector.one("b").attributes == {"error.type": "ValueError"}
    assert not collector.one("c").failed
    assert collector.one("c").attributes == {"agentrl.cancelled": True}


def test_a_collector_that_is_away_is_warned_of_once_and_delays_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.observe.tracing.FLUSH_SECONDS", 0.2)
    monkeypatch.setattr("agentrl.observe.tracing.EXPORT_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING), _opened("http://127.0.0.1:1"):
        for _ in range(600):
            _one_span()
    texts = [record.getMessage() for record in caplog.records]
    assert sum("spans cannot be sent to" in text for text in texts) == 1, texts
    assert sum("600 spans were lost, 0 were sent" in text for text in texts) == 1, texts
    assert len(texts) == 2, texts


class SlowExporter(SpanExporter):
    """Takes nothing until it is let."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.taken: list[str] = []
        self.fails = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.go.wait(10)
        if self.fails:
            self.fails -= 1
            raise ValueError("a fault of the library")
        self.taken += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.go.set()


def test_a_full_queue_drops_spans_and_counts_them(caplog: pytest.LogCaptureFixture) -> None:
    exporter = SlowExporter()
    sender = Sender(exporter, "there", limit=300)
    with use_tracer(Tracer(sender.tracer({}))), caplog.at_level(logging.INFO):
        for _ in range(1000):
            _one_span()
        exporter.go.set()
        sender.close(10)
    assert len(exporter.taken) == sender.sent
    assert 300 <= sender.sent <= 300 + 256
    assert sender.sent + sender.lost == 1000
    assert f"{sender.lost} spans were lost" in caplog.text


def test_a_fault_of_the_exporter_does_not_end_the_sender(caplog: pytest.LogCaptureFixture) -> None:
    exporter = SlowExporter()
    exporter.fails = 1
    exporter.go.set()
    sender = Sender(exporter, "there", limit=3000)
    with use_tracer(Tracer(sender.tracer({}))), caplog.at_level(logging.INFO):
        for _ in range(512):
            _one_span()
        sender.close(10)
    assert sender.sent + sender.lost == 512
    assert sender.sent > 0
    assert "ValueError: a fault of the library" in caplog.text
    assert "spans are sent to there again" in caplog.text


async def _child() -> None:
    with tracer().span("child"):
        await asyncio.sleep(0)


def _one_span() -> None:
    with tracer().span("x"):
        pass


def _opened(url: str) -> Any:
    return tracing(trace_flags(url), "test")


def test_grpc_takes_the_same_spans() -> None:
    grpc = pytest.importorskip("grpc")
    from concurrent.futures import ThreadPoolExecutor

    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    collector = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            collector.take(request.SerializeToString())
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with _opened(f"otlp://127.0.0.1:{port}"), tracer().span("over grpc"):
            pass
    finally:
        server.stop(None).wait()
    assert collector.one("over grpc").trace
