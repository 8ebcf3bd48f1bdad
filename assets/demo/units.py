"""Serve a unit converter as an MCP server over HTTP.

python -m agentrl.base.installation demo/units.py --port 8765
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

HOST = "127.0.0.1"
DEFAULT_PORT = 8765

# Each table maps a unit to its value in the first unit of the table.
_SCALES: dict[str, dict[str, float]] = {
    "length": {"m": 1.0, "mm": 0.001, "cm": 0.01, "km": 1000.0, "in": 0.0254, "ft": 0.3048, "mi": 1609.344},
    "mass": {"kg": 1.0, "g": 0.001, "t": 1000.0, "oz": 0.028349523125, "lb": 0.45359237},
    "time": {"s": 1.0, "ms": 0.001, "min": 60.0, "h": 3600.0, "d": 86400.0},
}
_TEMPERATURES = ("C", "F", "K")

server = MCPServer("units", log_level="WARNING")


@server.tool(structured_output=False)
def convert(value: float, from_unit: str, to_unit: str) -> str:
    """Converts between units of length, mass, time or temperature."""
    try:
        return f"{converted(value, from_unit, to_unit):.10g}"
    except ValueError as error:
        raise ToolError(str(error)) from error


@server.tool(structured_output=False)
def utc_now() -> str:
    """Date and time in UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def converted(value: float, from_unit: str, to_unit: str) -> float:
    """Convert ``value`` between two units. Raises ValueError with the known units."""
    if from_unit in _TEMPERATURES and to_unit in _TEMPERATURES:
        return _from_celsius(_to_celsius(value, from_unit), to_unit)
    for scale in _SCALES.values():
        if from_unit in scale and to_unit in scale:
            return value * scale[from_unit] / scale[to_unit]
    known = "; ".join(
        f"{quantity}: {', '.join(units)}"
        for quantity, units in [*_SCALES.items(), ("temperature", _TEMPERATURES)]
    )
    raise ValueError(f"cannot convert {from_unit!r} to {to_unit!r}; known units of {known}")


def _to_celsius(value: float, unit: str) -> float:
    return {"C": value, "F": (value - 32) / 1.8, "K": value - 273.15}[unit]


def _from_celsius(value: float, unit: str) -> float:
    return {"C": value, "F": value * 1.8 + 32, "K": value + 273.15}[unit]


def main() -> None:
    """Serve, by default on the loopback interface alone, until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default=HOST)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    arguments = parser.parse_args()
    server.run("streamable-http", host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
