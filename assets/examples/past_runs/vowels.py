"""The reward of this example: the share of vowels among the letters of a message."""

from agentrl import ScorerContext


def share(context: ScorerContext) -> float:
    """Score the last message; text without a letter scores 0."""
    letters = [letter for letter in str(context.messages[-1]["content"]).lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(1, len(letters))
