"""Test that no message contains a token of a tool server."""

from __future__ import annotations

import pytest

from agentrl.config.schema import ToolConfig
from agentrl.errors import ToolServerError
from agentrl.tools.config import HttpSpec, ManagerSpec, StdioSpec, redact_address, redact_secrets
from agentrl.tools.mcp import server
from agentrl.tools.pool import ToolPool

SECRET = "s3cr3t-token-0123456789"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h:80/mcp", "http://h:80/mcp"),
        (f"https://u:{SECRET}@h/mcp", "https://***@h/mcp"),
        (f"https://h/mcp?key={SECRET}", "https://h/mcp?***"),
        (f"https://h/{SECRET}/mcp#x", "https://h/***/mcp"),
    ],
)
def test_a_url_is_shown_without_its_tokens(url: str, shown: str) -> None:
    for spec in (HttpSpec(name="n", url=url), ManagerSpec(url=url, server="all")):
        assert redact_address(spec) == shown
        assert SECRET not in redact_secrets(f"GET {url} failed", spec)
        assert SECRET not in repr(spec)


def test_a_header_is_hidden_where_an_error_repeats_it() -> None:
    spec = HttpSpec(name="n", url="http://h/mcp", headers={"Authorization": f"Bearer {SECRET}"})
    assert redact_secrets(f"refused {SECRET} at http://h/mcp", spec) == "refused *** at http://h/mcp"


def test_a_command_is_shown_without_its_arguments() -> None:
    spec = StdioSpec(name="n", command="npx", args=(f"--key={SECRET}", "-y"), env={"KEY": SECRET + "x"})
    assert redact_address(spec) == "npx, 2 arguments"
    assert redact_secrets(f"npx -y --key={SECRET} {SECRET}x", spec) == "npx -y --key=*** ***"
    assert SECRET not in repr(spec)


async def test_a_server_that_cannot_be_reached_is_named_without_its_tokens(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RECONNECT_DELAYS", (0.0,))
    file = tmp_path_factory.mktemp("mcp") / "servers.yml"
    address = f"http://127.0.0.1:9/{SECRET}"
    for entry in (f"{{command: /no/such, args: [--token, {SECRET}]}}", f"{{url: '{address}?t={SECRET}'}}"):
        file.write_text(f"servers:\n  gone: {entry}\n")
        with pytest.raises(ToolServerError, match=r"tool server gone \(.*cannot be reached") as failed:
            await ToolPool(ToolConfig(mcp_servers_file=str(file))).open()
        assert SECRET not in str(failed.value)
    with pytest.raises(ToolServerError, match="cannot be reached") as failed:
        await ToolPool(ToolConfig(mcp_manager_url=f"{address}/mcpapi")).open()
    assert SECRET not in str(failed.value)
