"""Run many trajectories at once against public MCP servers and misbehaving ones: scripts/test_tools.sh."""
