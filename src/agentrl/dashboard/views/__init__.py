"""Arrange what the store holds for the pages: pure functions, without HTML and without the database."""
