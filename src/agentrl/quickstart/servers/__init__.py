"""MCP servers of the quickstart: a calculator over stdio and a unit converter over streamable HTTP."""
