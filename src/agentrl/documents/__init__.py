"""The stored documents: one frozen dataclass per collection, and their states. Knows no database."""
