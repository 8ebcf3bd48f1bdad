"""An MCP server that misbehaves on purpose, in plain JSON-RPC: ``misbehaving_server.py stdio|PORT``.

Over HTTP, the path chooses how: /mcp is well-behaved, /login asks for a login and /private for a token, /busy
is overloaded, /html answers a page, /garbage no JSON, /short less than it announces, /sse the answer as a
stream that may break off.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Send = Callable[[Json], None]

READ_ONLY = {"readOnlyHint": True}
SCHEMAS: dict[str, Json] = {
    "pid": {},
    "hang": {},
    "die": {},
    "die_once": {"marker": "string"},
    "note_and_die": {"marker": "string"},
    "huge": {"megabytes": "integer"},
    "noise": {},
    "garbage": {},
    "change_tools": {},
    "content": {"kind": "string"},
    "raw": {"kind": "string"},
    "progress": {"steps": "integer", "seconds": "number"},
    "append": {"text": "string"},
    "read": {},
    "clear": {},
    "meta": {},
    "wait": {"seconds": "number"},
    "barrier": {"calls": "integer"},
    "peak": {},
    "sessions": {},
    "log_out": {},
    "ask": {},
}
CONTENT: dict[str, Json] = {
    "image": {"content": [{"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"}]},
    "audio": {"content": [{"type": "audio", "data": "aGVsbG8=", "mimeType": "audio/wav"}]},
    "link": {
        "content": [{"type": "resource_link", "uri": "file:///a.txt", "name": "a", "mimeType": "text/x"}]
    },
    "embedded": {"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}]},
    "blob": {"content": [{"type": "resource", "resource": {"uri": "file:///a", "blob": "aGVsbG8="}}]},
    "unknown": {"content": [{"type": "text", "text": "seen"}, {"type": "hologram", "depth": 3}]},
    "structured": {"content": [], "structuredContent": {"a": [1, 2]}},
    "structured_twice": {"content": [{"type": "text", "text": '{"a": 1}'}], "structuredContent": {"a": 1}},
    "structured_more": {"content": [{"type": "text", "text": "done"}], "structuredContent": {"a": 1}},
    "wrong": {"content": ["bare", 3, {"text": "no type"}]},
    "outage": {
        "content": [{"type": "text", "text": "the index is down"}],
        "isError": True,
        "_meta": {"agentrl/outage": True},
    },
    "none": {},
    "empty": {"content": []},
}


class Tools:
    """The tools and their state, which all connections of this process share."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.extra = False
        self.logged_in = True
        self.sessions: set[str] = set()
        self.waiting = self.running = self.peak = 0
        self.arrived = threading.Condition()

    def answer(self, message: Json, send: Send) -> Json | None:
        """Return the answer to a request, if it gets one; ``send`` sends a notification before it."""
        method, number = message["method"], message.get("id")
        if number is None:
            return None
        params = message.get("params") or {}
        if method == "initialize":
            kinds = {"tools": {"listChanged": True}, "resources": {}, "prompts": {}}
            info = {"name": "misbehaving", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": kinds, "serverInfo": info}
        elif method == "tools/list":
            result = {"tools": self.tools()}
        elif method == "tools/call":
            found = self.call(params["name"], params.get("arguments") or {}, params.get("_meta") or {}, send)
            if found is None:
                return None
            result = found
        elif method in OTHERS:
            result = OTHERS[method]
        else:
            error = {"code": -32601, "message": f"no method {method}"}
            return {"jsonrpc": "2.0", "id": number, "error": error}
        return {"jsonrpc": "2.0", "id": number, "result": result}

    def tools(self) -> list[Json]:
        """Return the tools; with an output schema, one without a schema, and one that is not a tool."""
        schemas = {**SCHEMAS, "extra": {}} if self.extra else SCHEMAS
        if self.extra:
            schemas = {name: schema for name, schema in schemas.items() if name != "clear"}
        tools: list[Json] = [
            {
                "name": name,
                "description": f"The tool {name}.",
                "inputSchema": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in schema.items()},
                },
                "outputSchema": {"type": "object", "properties": {"never": {"type": "string"}}},
                **({"annotations": READ_ONLY} if name == "die_once" else {}),
            }
            for name, schema in schemas.items()
        ]
        return [*tools, {"description": "nameless"}, {"name": "schemaless", "inputSchema": None}]

    def call(self, name: str, arguments: Json, meta: Json, send: Send) -> Json | None:
        """Run one tool; None: it never answers."""
        if name == "hang":
            return None
        if name == "content":
            return CONTENT[arguments["kind"]]
        if name == "raw":
            return {"content": [], "structuredContent": {"id": 5, "value": f"raw {arguments['kind']}"}}
        if name == "noise":
            send({"noise": True})
        if name in ("die", "note_and_die", "die_once", "garbage"):
            self.fail(name, arguments, send)
        if name == "change_tools":
            self.extra = True
            send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
        if name == "progress":
            for step in range(arguments["steps"]):
                time.sleep(arguments["seconds"])
                token = {"progressToken": meta.get("progressToken"), "progress": step + 1}
                send({"jsonrpc": "2.0", "method": "notifications/progress", "params": token})
        if name == "append":
            self.lines.append(arguments["text"])
        if name == "clear":
            self.lines.clear()
        if name == "log_out":
            self.logged_in = False
        if name == "wait":
            self.running += 1
            self.peak = max(self.peak, self.running)
            time.sleep(arguments["seconds"])
            self.running -= 1
        if name == "barrier":
            self.barrier(arguments["calls"])
        shown = {
            "pid": str(os.getpid()),
            "huge": "x" * (2**20 * arguments.get("megabytes", 0)),
            "read": ",".join(self.lines),
            "barrier": str(self.waiting),
            "peak": str(self.peak),
            "sessions": str(len(self.sessions)),
            "meta": json.dumps(meta),
        }
        return {"content": [{"type": "text", "text": shown.get(name, f"{name} done")}]}

    def fail(self, name: str, arguments: Json, send: Send) -> None:
        """Die, or write garbage until killed."""
        if name == "garbage":
            while True:
                send({"noise": True})
        if name == "die":
            os._exit(3)
        marker = Path(arguments["marker"])
        if name == "note_and_die" or not marker.exists():
            with marker.open("a") as file:
                file.write("called\n")
            os._exit(3)

    def barrier(self, calls: int) -> None:
        """Wait until ``calls`` calls wait here."""
        with self.arrived:
            self.waiting += 1
            self.arrived.notify_all()
            self.arrived.wait_for(lambda: self.waiting >= calls, timeout=60)


OTHERS: dict[str, Json] = {
    "ping": {},
    "resources/list": {"resources": [{"uri": "memo://one", "name": "one", "mimeType": "text/plain"}]},
    "resources/templates/list": {"resourceTemplates": [{"uriTemplate": "memo://{id}", "name": "any"}]},
    "resources/read": {"contents": [{"uri": "memo://one", "text": "the memo"}]},
    "prompts/list": {"prompts": [{"name": "greet", "arguments": [{"name": "who", "required": True}]}]},
    "prompts/get": {"messages": [{"role": "user", "content": {"type": "text", "text": "Greet Ada."}}]},
}


RAW = {
    b'"raw utf8"': b'"\xff"',
    b'"raw surrogate"': rb'"\ud800"',
    b'"raw depth"': b"[" * 500 + b"]" * 500,
    b'"raw great depth"': b"[" * 5000 + b"]" * 5000,
    b'"raw broken"': b"{",
    b'"raw nan"': b"[NaN, Infinity, 1e999]",
}
"""What the tool ``raw`` writes in place of its value."""


def encode(message: Json) -> bytes:
    """Return the JSON of a message, with the raw bytes of the tool ``raw``."""
    content = json.dumps(message).encode()
    for mark, raw in RAW.items():
        content = content.replace(mark, raw)
    return content


def serve_stdio() -> None:
    """Answer each line in a thread of its own."""
    tools, lock = Tools(), threading.Lock()

    def send(message: Json) -> None:
        with lock:
            garbage = "\x00\xff not JSON {\n".encode() * 100 if "noise" in message else b""
            sys.stdout.buffer.write(garbage or encode(message) + b"\n")
            sys.stdout.buffer.flush()

    def handle(line: str) -> None:
        answer = tools.answer(json.loads(line), send)
        if answer is not None:
            send(answer)

    print("misbehaving server started", file=sys.stderr)
    for line in sys.stdin:
        threading.Thread(target=handle, args=(line,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """One POST, answered as its path says."""

    protocol_version = "HTTP/1.1"
    tools = Tools()

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_call = message["method"] == "tools/call"
        is_private = self.path == "/private" and self.headers.get("Authorization") != "Bearer let me in"
        if self.path == "/login" or is_private or not self.tools.logged_in:
            return self.say(401, "text/html", b"<h1>Please log in</h1>", {"WWW-Authenticate": "Bearer"})
        if self.path == "/busy" and is_call:
            return self.say(429, "text/plain", b"slow down", {"Retry-After": "7"})
        if self.path == "/html":
            return self.say(200, "text/html", b"<h1>Welcome</h1>")
        if self.path == "/garbage" and is_call:
            return self.say(200, "application/json", b"\xff\x00 not JSON")
        if message["method"] == "initialize":
            session = uuid.uuid4().hex
            self.tools.sessions.add(session)
        elif self.headers.get("Mcp-Session-Id") not in self.tools.sessions and "id" in message:
            return self.say(404, "text/plain", b"no such session")
        if "id" not in message:
            return self.say(202, "text/plain", b"")
        if self.path == "/sse" and is_call:
            return self.stream(message)
        answer = self.tools.answer(message, lambda _: None)
        if answer is None:
            time.sleep(60)
        headers = {"Mcp-Session-Id": session} if message["method"] == "initialize" else {}
        return self.say(200, "application/json", encode(answer), headers)

    def do_GET(self) -> None:
        self.say(405, "text/plain", b"no stream")

    def do_DELETE(self) -> None:
        self.say(200, "text/plain", b"")

    def stream(self, message: Json) -> None:
        """Answer as an event stream; the tool ``die`` breaks it off."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

        def send(item: Json) -> None:
            self.wfile.write(b"event: message\ndata: " + encode(item) + b"\n\n")
            self.wfile.flush()

        if message["params"]["name"] != "die":
            answer = self.tools.answer(message, send)
            if answer is not None:
                send(answer)
        self.close_connection = True

    def say(self, status: int, kind: str, body: bytes, headers: Json | None = None) -> None:
        """Send one response; on /short, less than it announces."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        is_short = self.path == "/short" and b'"wait done"' in body
        self.send_header("Content-Length", str(len(body) + 10 * is_short))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.close_connection or is_short

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class Server(ThreadingHTTPServer):
    """Accepts many connections at a time."""

    request_queue_size = 512
    daemon_threads = True


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        serve_stdio()
    else:
        Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
