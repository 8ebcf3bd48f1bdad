"""Flags of an agent: its turns and context, its tools, and the gateway by which others call the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.config.flags import Flags, flag, names_in, require

_RESERVE = 1024
"""Default of ``--prompt_reserve_tokens``."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Flags):
    """One trajectory: its agent, turns and context."""

    section = "agent"

    agent_name: str = flag("react", "agent of tasks that name none")
    agent_cfg_path: str | None = flag(
        None,
        "YAML file with the configuration of the agent, of tasks that name none; for --agent_name command it"
        " describes the harness (docs/harnesses.md)",
        per_process=True,
    )
    system_prompt: str | None = flag(None, "system prompt of tasks that have none")
    query_prompt: str | None = flag(
        None, "template of the user message, with {query}, of tasks that have none"
    )
    max_turns: int = flag(16, "model calls per trajectory", within="[1, inf)", unit="model calls")
    max_prompt_tokens: int = flag(
        32768,
        "longest prompt; a longer context is reset or ends the trajectory",
        within="[1, inf)",
        unit="tokens",
    )
    prompt_reserve_tokens: int = flag(
        _RESERVE,
        "the context counts as full at --max_prompt_tokens minus this; an eighth of --max_prompt_tokens if"
        f" that is {_RESERVE} or less",
        within="[0, inf)",
        unit="tokens",
    )
    new_context: str = flag(
        "disabled",
        "context manager, called when the context is full: disabled (ends the trajectory), discard_all_tools"
        " (drops tool results), discard_all (starts from a summary), summarize (a summary and the latest tool"
        " calls), or your own as module:name",
    )
    repetition_early_stop_times: int = flag(
        -1,
        "end the trajectory after this many equal assistant messages (-1: never)",
        within="[-1, inf)",
        unit="messages",
    )
    enable_repetition_compress: bool = flag(
        False, "on repetition, reset the context instead of ending the trajectory"
    )
    tool_call_parser: str | None = flag(
        None,
        "how tool calls are written: hermes, qwen3_coder, llama, … (docs/tool_calls.md), or your own as"
        " module:name (default: as the chat format or the marks in the chat template say)",
    )
    trajectory_timeout_seconds: float = flag(
        3600.0, "timeout of one trajectory", within="(0, inf)", unit="seconds"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_reserve_tokens == _RESERVE >= self.max_prompt_tokens:
            object.__setattr__(self, "prompt_reserve_tokens", self.max_prompt_tokens // 8)
        require(
            self.max_prompt_tokens > self.prompt_reserve_tokens,
            f"--max_prompt_tokens {self.max_prompt_tokens} leaves nothing beside"
            f" --prompt_reserve_tokens {self.prompt_reserve_tokens}",
            "raise --max_prompt_tokens or lower --prompt_reserve_tokens",
        )


@dataclass(frozen=True, kw_only=True)
class ToolConfig(Flags):
    """The tools that a model may call, and their limits."""

    section = "tools"

    tools: str = flag(
        "", "Python tools, comma-separated: module:name of functions or classes, or registered names"
    )
    tool_config_path: str | None = flag(
        None, "verl's tool configuration, YAML: classes of tools with their settings and schemas"
    )
    mcp_manager_url: str | None = flag(None, "URL of an MCP manager (…/mcpapi) or a streamable-HTTP server")
    mcp_server_name: str = flag("all", "server to use behind --mcp_manager_url")
    mcp_servers_file: str | None = flag(
        None, "MCP servers by name (command or url): YAML, or the mcpServers JSON of other clients"
    )
    mcp_auth_token_env: str = flag("MCP_AUTH_TOKEN", "environment variable with the MCP bearer token")
    tool_timeout_seconds: float = flag(
        60.0,
        "timeout of one tool call; each progress message of the tool restarts it",
        within="(0, inf)",
        unit="seconds",
    )
    max_tool_result_chars: int = flag(
        32768,
        "a longer tool result is cut, with a notice to the model",
        within="[1, inf)",
        unit="characters",
    )
    max_parallel_tool_calls: int = flag(
        8, "tool calls of one turn that run at a time", within="[1, inf)", unit="calls"
    )
    max_tool_connections: int = flag(
        256,
        "calls in flight at one tool server, and connections of an HTTP pool; further calls wait",
        within="[1, inf)",
        unit="calls",
        per_process=True,
    )

    @property
    def any_named(self) -> bool:
        """Return whether a flag names tools."""
        return bool(self.tools or self.tool_config_path or self.mcp_manager_url or self.mcp_servers_file)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(Flags):
    """Gateways: model APIs in front of rollouts."""

    section = "gateway"
    is_per_process = True

    gateway_host: str = flag("127.0.0.1", "address that a gateway listens on")
    gateway_port: int = flag(
        8790,
        "port of `agentrl gateway` (0: a free one); a gateway inside `agentrl sample` takes a free one",
        within="[0, 65535]",
    )
    gateway_allowed_hosts: str = flag(
        "",
        "names, comma-separated, besides localhost and IP addresses, by which clients and web pages may ask a"
        " gateway that listens on a loopback address",
    )
    gateway_url: str | None = flag(
        None,
        "URL of an `agentrl gateway` that serves this sampler's trajectories (default: one inside the"
        " sampler)",
    )
    gateway_models: str = flag(
        "policy",
        "names, comma-separated, by which a client may name the policy; claude-* allows all that begin so",
    )
    gateway_train: Literal["tasks", "feedback"] = flag(
        "tasks",
        "what `agentrl gateway` serves: trajectories of tasks, or also conversations that a product opens,"
        " which are trained by their feedback (docs/gateway.md)",
    )
    gateway_key_env: str = flag(
        "AGENTRL_GATEWAY_KEY",
        "environment variable with the bearer token for opening conversations and giving feedback; needed if"
        " --gateway_host is not this machine alone",
    )
    gateway_idle_minutes: float = flag(
        30.0,
        "a conversation without a request for this long has ended",
        within="(0, inf)",
        unit="minutes",
    )
    gateway_body_mb: float = flag(8.0, "largest body of a request", within="(0, inf)", unit="MiB")
    gateway_timeout_seconds: float = flag(
        60.0, "time for the body of a request to arrive", within="(0, inf)", unit="seconds"
    )
    gateway_retry_seconds: float = flag(
        10.0,
        "a request with the body of one that ended this long ago or less is its retry and gets its answer",
        within="[0, inf)",
        unit="seconds",
    )

    @property
    def idle_seconds(self) -> float:
        """``--gateway_idle_minutes`` in seconds."""
        return 60 * self.gateway_idle_minutes

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names and patterns of the policy; the first one is a name."""
        given = names_in(self.gateway_models)
        names = [name for name in given if not is_pattern(name)] or ["policy"]
        return (*names, *filter(is_pattern, given))


def is_pattern(name: str) -> bool:
    """Return whether a name of the policy stands for several, as ``claude-*`` does."""
    return any(letter in name for letter in "*?[")
