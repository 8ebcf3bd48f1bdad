"""Answers → scores; scores of a group → advantages."""
