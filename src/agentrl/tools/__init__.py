"""Tools that agents call: MCP servers and the MCP manager, behind one pool."""
