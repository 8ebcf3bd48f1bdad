"""What is stored: one frozen dataclass per collection, its states, and nothing about a database."""
