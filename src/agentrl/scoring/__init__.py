"""Answers → scores, and the scores of a group → advantages."""
