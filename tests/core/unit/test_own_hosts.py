"""Requests of other sites: foreign Host headers (DNS rebinding) and foreign Origins."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from agentrl.base.bounded_http import for_own_hosts, is_loopback

pytestmark = pytest.mark.attack


def client(host: str, *names: str) -> TestClient:
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("ok"), methods=["POST"])])
    return TestClient(for_own_hosts(app, host, *names), base_url="http://127.0.0.1:8790")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200), ({"host": "localhost:8790"}, 200), ({"host": "[::1]:8790"}, 200),
        ({"host": "LOCALHOST."}, 200), ({"host": "chat.example:1", "origin": "https://chat.example"}, 200),
        ({"origin": "http://127.0.0.1:8790"}, 200), ({"origin": "http://localhost:3000"}, 200),
        ({"host": "evil.example:8790"}, 421), ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "localhost.evil.example"}, 421), ({"host": ""}, 421),
        ({"origin": "http://evil.example"}, 421), ({"origin": "http://203.0.113.5"}, 421),
        ({"origin": "http://localhost@evil.example"}, 421), ({"origin": "null"}, 421), ({"origin": ""}, 421),
        ({"origin": "http://[::1"}, 421), ({"origin": "file://"}, 421),
        ({"host": "evil.example", "x-forwarded-host": "localhost"}, 421),
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
    ],
)  # fmt: skip
def test_a_loopback_server_answers_its_own_machine_alone(headers: dict[str, str], status: int) -> None:
    answer = client("127.0.0.1", "chat.example").post("/", headers=headers)
    assert answer.status_code == status, answer.text


def test_an_address_that_others_reach_has_names_that_are_not_known() -> None:
    assert client("0.0.0.0").post("/", headers={"host": "any.example"}).status_code == 200
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "example")] == [
        True, True, True, False, False,
    ]  # fmt: skip
