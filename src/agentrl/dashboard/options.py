"""The options that a dashboard is started with."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class DashboardOptions:
    """Where the runs are, and who may look at them."""

    run: RunConfig
    """Its ``db_connection_string``, ``mongo_dir`` and ``db_timeout_seconds`` find the server; the name of its
    run is not used."""
    token: str | None = None
    """Every request must bring it, in a cookie, as ``?token=`` or as a bearer token; None asks for none."""
    hosts: tuple[str, ...] = ()
    """Names besides ``localhost`` and IP addresses that the Host header may have."""
    cookie: str = field(default="agentrl_token")
    """Name of the cookie; two dashboards of one host need two."""
