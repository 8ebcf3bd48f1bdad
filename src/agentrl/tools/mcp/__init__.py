"""Talk to MCP servers: transports, connections, and servers that are shared or each trajectory's own."""
