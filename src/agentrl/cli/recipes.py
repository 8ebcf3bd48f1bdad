"""``agentrl recipes``: list what ``--recipe`` takes, or show one recipe or a file of one."""

from __future__ import annotations

import shlex

from agentrl.config.flags import JsonFlags, flag_words
from agentrl.config.load import CommandParser, Recipe, read_recipe, recipe_names


def main(argv: list[str]) -> int:
    """Print each recipe with its golden value, its source and its flags."""
    parser = CommandParser(
        prog="agentrl recipes",
        description="Lists the recipes: flags of a paper, of another system or of the original, and the loss"
        " of a small step that they give (docs/losses.md). --recipe NAME of any command of a run takes them.",
    )
    parser.add_argument(
        "recipe", metavar="NAME", nargs="?", help="show this one: a name, or a YAML file (default: all)"
    )
    parser.add_flags(JsonFlags)
    arguments = parser.parse_args(argv)
    found = [read_recipe(name) for name in ([arguments.recipe] if arguments.recipe else recipe_names())]
    if arguments.json:
        from agentrl.observe.terminal import print_json

        # Print words: JSON has no infinity.
        print_json([{**vars(recipe), "flags": flag_words(recipe.flags)} for recipe in found])
    else:
        print("\n\n".join(map(_text, found)))
    return 0


def _text(recipe: Recipe) -> str:
    golden = "" if recipe.golden is None else f", golden value {recipe.golden:+.4g}"
    return f"{recipe.name}{golden}\n  {recipe.source}\n  {shlex.join(flag_words(recipe.flags))}"
