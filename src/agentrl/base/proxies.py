"""Choose the proxy of a request by one rule, whatever client sends it.

This machine and the hosts of ``no_proxy`` are reached directly, all others as ``http_proxy``, ``https_proxy``
and ``all_proxy`` say, in either case. Why not each library's own rule? One takes no network (``10.0.0.0/8``)
in ``no_proxy``, one fails at ``[::1]``, one ignores the variables, and most send
loopback addresses to the proxy.
"""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import httpx2

from agentrl.base.bounded_http import is_loopback


def proxy_of(url: str) -> str | None:
    """Return the URL of the proxy for requests to ``url``; None if they are sent directly."""
    proxies = getproxies_environment()
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxy = proxies.get({"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)) or proxies.get("all")
    if not proxy or is_loopback(host) or host.endswith(".localhost"):
        return None
    netloc = parts.netloc.rpartition("@")[2]
    if proxy_bypass_environment(netloc, proxies) or _is_listed(host, proxies.get("no", "")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_listed(host: str, listed: str) -> bool:
    """Return whether an address is one of ``listed``, or in one of its networks."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for entry in listed.split(","):
        try:
            network = ipaddress.ip_network(entry.strip().strip("[]"), strict=False)
        except ValueError:
            continue
        if address in network:
            return True
    return False


class ProxiedTransport(httpx2.AsyncBaseTransport):
    """Sends each request directly or through the proxy of its URL, also after a redirect."""

    def __init__(self, **options: Any) -> None:
        """``options`` go to ``httpx2.AsyncHTTPTransport``: ``limits``, ``verify``."""
        self._options = options
        self._transports: dict[str | None, httpx2.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        proxy = proxy_of(str(request.url))
        if proxy not in self._transports:
            self._transports[proxy] = httpx2.AsyncHTTPTransport(proxy=proxy, **self._options)
        return await self._transports[proxy].handle_async_request(request)

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()


def blocking_transport(url: str, **options: Any) -> httpx2.HTTPTransport:
    """Return the transport of a client that is not async, for requests to the host of ``url``."""
    return httpx2.HTTPTransport(proxy=proxy_of(url), **options)
