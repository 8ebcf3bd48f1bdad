"""MCP servers of the quickstart: a calculator over stdio, a unit converter over streamable HTTP."""
