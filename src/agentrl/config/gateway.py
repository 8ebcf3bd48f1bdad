"""Flags of gateways: where they listen, and the limits of their clients."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.fields import Flags, flag


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(Flags):
    """Gateways: model APIs in front of rollouts."""

    section = "gateway"

    gateway_host: str = flag("127.0.0.1", "address that a gateway listens on", per_process=True)
    gateway_port: int = flag(
        8790,
        "port of `agentrl gateway` (0: a free one); a gateway inside `agentrl sample` takes a free one",
        within="[0, 65535]",
        per_process=True,
    )
    gateway_url: str | None = flag(
        None,
        "URL of an `agentrl gateway` that serves this sampler's trajectories (default: one inside the"
        " sampler)",
        per_process=True,
    )
    gateway_models: str = flag(
        "policy",
        "names, comma-separated, by which a client may name the policy; claude-* allows all that begin so",
        per_process=True,
    )
    gateway_body_mb: float = flag(
        8.0, "largest body of a request", within="(0, inf)", unit="MiB", per_process=True
    )
    gateway_timeout_seconds: float = flag(
        60.0, "time for the body of a request to arrive", within="(0, inf)", unit="seconds", per_process=True
    )
    gateway_retry_seconds: float = flag(
        10.0,
        "a request with the body of one that ended this long ago or less is its retry and gets its answer",
        within="[0, inf)",
        unit="seconds",
        per_process=True,
    )

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names and patterns of the policy; the first one is a name."""
        given = [name.strip() for name in self.gateway_models.split(",") if name.strip()]
        names = [name for name in given if not is_pattern(name)] or ["policy"]
        return (*names, *filter(is_pattern, given))


def is_pattern(name: str) -> bool:
    """Return whether a name of the policy stands for several, as ``claude-*`` does."""
    return any(letter in name for letter in "*?[")
