"""Who may look: the Host header, the token and its cookie, and the headers of every response."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from httpx2 import ASGITransport, AsyncClient

from agentrl.base.bounded_http import _Server
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.screens.dashboard.render import asset
from agentrl.screens.dashboard.serve import DashboardOptions, _listen, _token, create_app, serve

TOKEN = "a-token-of-some-length"

pytestmark = pytest.mark.attack


@pytest.fixture
async def guarded() -> AsyncIterator[AsyncClient]:
    app = create_app(DashboardOptions(run=RunConfig(), token=TOKEN, hosts=("board.example",)))
    transport = ASGITransport(app)
    async with AsyncClient(transport=transport, base_url="http://127.0.0.1:8900") as client:
        yield client


async def test_without_the_token_nothing_is_shown(guarded: AsyncClient) -> None:
    for path in ("/", "/compare", "/runs/any", "/runs/any/events", "/nothing", "/static", "//static/1/x"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "agentrl_token=wrong"}):
            answer = await guarded.get(f"http://127.0.0.1:8900{path}", headers=headers)
            assert (path, answer.status_code) == (path, 401)
            assert TOKEN not in answer.text
    answer = await guarded.get("/", headers={"Host": "127.0.0.1:8900/static/"})
    assert answer.status_code in (401, 421)


async def test_a_failed_login_is_a_page_that_asks_again(guarded: AsyncClient) -> None:
    asked, refused = await guarded.get("/"), await guarded.get("/?token=wrong")
    assert "This dashboard asks for its token" in asked.text
    assert "This is not the token of this dashboard" in refused.text
    for answer in (asked, refused):
        assert answer.headers["www-authenticate"] == "Bearer"
        assert '<input type="password" name="token"' in answer.text
        for address in re.findall(r'"(/static/[^"]+)"', answer.text):
            assert (await guarded.get(address)).status_code == 200


async def test_the_first_visit_leaves_a_cookie_and_no_token_in_the_address(guarded: AsyncClient) -> None:
    first = await guarded.get(f"{asset('style.css')}?token={TOKEN}&x=1")
    assert first.status_code == 303
    assert first.headers["location"] == f"{asset('style.css')}?x=1"
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert (await guarded.get("/nothing")).status_code == 404


async def test_a_script_sends_the_token_as_a_bearer_token(guarded: AsyncClient) -> None:
    answer = await guarded.get("/nothing", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 404


async def test_a_redirect_stays_on_this_host(guarded: AsyncClient) -> None:
    answer = await guarded.get(f"http://127.0.0.1:8900//evil.example/?token={TOKEN}")
    assert answer.headers["location"] == "/evil.example/"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8900", 200), ("localhost:1", 200), ("[::1]:8900", 200), ("10.1.2.3", 200),
        ("board.example:8900", 200), ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("", 421),
    ],
)  # fmt: skip
async def test_only_own_hosts_are_answered(host: str, status: int) -> None:
    app = create_app(DashboardOptions(run=RunConfig(), hosts=("board.example",)))
    async with AsyncClient(transport=ASGITransport(app), base_url="http://x") as client:
        answer = await client.get(asset("style.css"), headers={"Host": host})
    assert answer.status_code == status


async def test_every_response_forbids_foreign_and_inline_scripts(guarded: AsyncClient) -> None:
    for path in ("/nothing", "/?token=wrong"):
        answer = await guarded.get(path, headers={"Authorization": f"Bearer {TOKEN}"})
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


async def test_what_draws_charts_comes_with_the_dashboard(guarded: AsyncClient) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Accept-Encoding": "identity"}
    answer = await guarded.get(asset("uPlot.min.js"), headers=headers)
    assert answer.status_code == 200
    assert "immutable" in answer.headers["cache-control"]
    assert b"uPlot (v1.6.32)" in answer.content[:100]
    assert (await guarded.get("/static/1/../options.py", headers=headers)).status_code == 404


def token_file(folder: Path, content: str) -> Path:
    """Write a file that only its owner may read."""
    file = folder / "token"
    file.touch(0o600)
    file.write_text(content, encoding="utf-8")
    return file


def test_every_dashboard_has_a_token_also_on_loopback(tmp_path: Path) -> None:
    made = {_token(None) for _ in range(3)}
    assert len(made) == 3
    assert min(map(len, made)) > 40
    assert _token(token_file(tmp_path, f"{TOKEN}\n")) == TOKEN


async def test_only_a_token_that_is_made_here_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def close(self: _Server, sockets: list[socket.socket]) -> None:
        for listener in sockets:
            listener.close()

    monkeypatch.setattr(_Server, "serve", close)
    said: list[str] = []
    await serve(RunConfig(), said.append, host="0.0.0.0", token_file=token_file(tmp_path, TOKEN))
    await serve(RunConfig(), said.append, host="0.0.0.0")
    assert said[0].endswith("/")
    assert "?token=" in said[1]


@pytest.mark.parametrize("content", ["short", "", "a token with spaces in it", None])
def test_a_useless_token_file_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token" if content is None else token_file(tmp_path, content)
    with pytest.raises(ConfigError, match="token"):
        _token(file)


def test_a_token_file_that_every_user_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "open" / "token"
    file.parent.mkdir()
    file.write_text(TOKEN, encoding="utf-8")
    file.chmod(0o644)
    file.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="can be read by every user of this machine"):
        _token(file)
    file.parent.chmod(0o700)
    assert _token(file) == TOKEN


def test_a_taken_port_is_named_and_the_default_moves_on() -> None:
    with _listen("127.0.0.1", None) as first:
        taken = first.getsockname()[1]
        with pytest.raises(ConfigError, match=str(taken)):
            _listen("127.0.0.1", taken)
        with _listen("127.0.0.1", None) as second:
            assert second.getsockname()[1] != taken
    with pytest.raises(ConfigError, match="cannot listen"):
        _listen("no.such.host.invalid", None)
