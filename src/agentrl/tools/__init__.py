"""Tools that a model may call: MCP servers, MCP managers, and Python functions."""
