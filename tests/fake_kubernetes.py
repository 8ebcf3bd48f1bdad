"""A stand-in for Kubernetes' API server: Jobs are copies of a folder, commands run in them by ``unshare``."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from fake_docker import inside, kill_inside
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

TOKEN = "sesame"


class FakeKubernetes:
    """Jobs in memory. websockets reads requests without a body: a proxy in front turns them into headers."""

    def __init__(self, folder: Path, rootfs: Path) -> None:
        self.folder, self.rootfs = folder, rootfs
        self.jobs: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.ended: dict[str, str] = {}
        """Job → why its container has ended."""
        self._http: asyncio.Server | None = None
        self._sockets: Server | None = None

    async def start(self) -> Path:
        """Start it; return a kubeconfig."""
        self._sockets = await serve(
            self._exec, "127.0.0.1", 0, subprotocols=[Subprotocol("v5.channel.k8s.io")], max_size=None,
            process_request=self._refuse,
        )  # fmt: skip
        self._http = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._http.sockets[0].getsockname()[1]
        path = self.folder / "kubeconfig"
        path.write_text(yaml.safe_dump({
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "rl"}}],
            "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }))  # fmt: skip
        return path

    async def stop(self) -> None:
        """Stop it."""
        for server in (self._http, self._sockets):
            if server is not None:
                server.close()
                await server.wait_closed()

    def _refuse(self, connection: ServerConnection, request: Request) -> Response | None:
        good = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        return None if good else Response(HTTPStatus.UNAUTHORIZED, "no", Headers())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, or pass a websocket's bytes on."""
        head_bytes = await reader.readuntil(b"\r\n\r\n")
        if b"upgrade: websocket" in head_bytes.lower() and self._sockets is not None:
            port = self._sockets.sockets[0].getsockname()[1]
            back_reader, back = await asyncio.open_connection("127.0.0.1", port)
            back.write(head_bytes)
            await asyncio.gather(_pump(reader, back), _pump(back_reader, writer))
            return
        lines = head_bytes.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, target, _ = lines[0].split()
        code, answer = 401, {"message": "no"}
        if headers.get("authorization") == f"bearer {TOKEN}":
            code, answer = self._answer(method, target, json.loads(body or b"{}"))
        text = json.dumps(answer).encode()
        writer.write(
            f"HTTP/1.1 {code} X\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text
        )
        await writer.drain()
        writer.close()

    def _answer(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        url = urlsplit(target)
        self.calls.append(f"{method} {url.path}")
        kind, _, name = url.path.split("/namespaces/rl/")[1].partition("/")
        selector = parse_qs(url.query).get("labelSelector", [""])[0]
        if kind == "jobs" and method == "POST":
            name = body["metadata"]["name"]
            shutil.copytree(self.rootfs, self.folder / name, symlinks=True)
            self.jobs[name] = body
            return 201, body
        if kind == "jobs" and method == "DELETE":
            kill_inside(self.folder / name)
            shutil.rmtree(self.folder / name, ignore_errors=True)
            return (200, {}) if self.jobs.pop(name, None) else (404, {"message": "no such job"})
        if kind == "jobs":
            return 200, {"items": list(self.jobs.values())}
        wanted = selector.removeprefix("job-name=") or name.removesuffix("-pod")
        pods = [self._pod(job) for job in self.jobs if job == wanted]
        return (
            (200, pods[0] if name else {"items": pods}) if pods or not name else (404, {"message": "no pod"})
        )

    def _pod(self, job: str) -> dict[str, Any]:
        state = {"running": {}} if job not in self.ended else {"terminated": {"reason": self.ended[job]}}
        return {
            "metadata": {"name": f"{job}-pod"},
            "status": {"phase": "Running", "containerStatuses": [{"state": state}]},
        }  # fmt: skip

    async def _exec(self, connection: ServerConnection) -> None:
        request = connection.request
        assert request is not None
        url = urlsplit(request.path)
        self.calls.append(request.path)
        job = url.path.split("/pods/")[1].removesuffix("/exec").removesuffix("-pod")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *inside(self.folder / job, "/", parse_qs(url.query)["command"]), stdin=pipe, stdout=pipe,
            stderr=pipe, env={"PATH": "/usr/bin:/bin"}, start_new_session=True,
        )  # fmt: skip

        async def pass_on(stream: asyncio.StreamReader | None, channel: bytes) -> None:
            while stream is not None and (chunk := await stream.read(65536)):
                with suppress(ConnectionClosed):  # the client has gone; it kills the command by another one
                    await connection.send(channel + chunk)

        async def feed() -> None:
            assert process.stdin is not None
            async for message in connection:
                assert isinstance(message, bytes)
                if message == b"\xff\0":
                    process.stdin.close()
                else:
                    process.stdin.write(message[1:])
            process.stdin.close()

        feeding = asyncio.create_task(feed())
        try:
            await asyncio.gather(pass_on(process.stdout, b"\1"), pass_on(process.stderr, b"\2"))
            code = await process.wait()
            causes = [{"reason": "ExitCode", "message": str(code if code >= 0 else 128 - code)}]
            status = {"status": "Failure", "details": {"causes": causes}} if code else {"status": "Success"}
            await connection.send(b"\3" + json.dumps(status).encode())
        except ConnectionClosed:
            return
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    except OSError:
        return
    finally:
        writer.close()
