"""The shipped recipes that have a golden value, and their table in docs/losses.md."""

from __future__ import annotations

import shlex

from parsed_flags import parsed

from agentrl.config.flags import flag_words
from agentrl.config.load import Configs, Recipe, read_recipe, recipe_names

RECIPES = {recipe.name: recipe for recipe in map(read_recipe, recipe_names()) if recipe.golden is not None}
CONFIGS: dict[str, Configs] = {name: parsed("--recipe", name) for name in RECIPES}
"""What `agentrl train --recipe NAME` parses."""


def table() -> str:
    """Return the table in Markdown."""
    head = "| recipe | flags | source | golden |", "|---|---|---|---|"
    return "\n".join([*head, *map(_row, RECIPES.values())])


def _row(recipe: Recipe) -> str:
    return (
        f"| `{recipe.name}` | `{shlex.join(flag_words(recipe.flags))}` | {recipe.source} |"
        f" {recipe.golden:+.4g} |"
    )
