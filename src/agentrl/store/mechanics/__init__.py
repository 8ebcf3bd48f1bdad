"""How the store reads and writes: connection, retries, leases, coalesced writes, large fields, changes."""
