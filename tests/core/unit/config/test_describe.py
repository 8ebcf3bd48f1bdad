"""docs/flags.md says what the schema says."""

from pathlib import Path

from agentrl.config.schema import flags_page

ROOT = Path(__file__).parents[4]


def test_the_flags_page_is_up_to_date():
    assert (ROOT / "docs/flags.md").read_text(encoding="utf-8") == flags_page(), (
        "run: python -m agentrl.config.schema > docs/flags.md"
    )
