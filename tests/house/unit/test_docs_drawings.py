"""The figures of docs/concepts.md are those that scripts/docs_drawings.py draws."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ElementTree

import pytest
from docs_pages import DOCS, ROOT

_SPEC = importlib.util.spec_from_file_location("docs_drawings", ROOT / "scripts/docs_drawings.py")
assert _SPEC is not None
assert _SPEC.loader is not None
docs_drawings = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(docs_drawings)


@pytest.mark.parametrize("name", sorted(docs_drawings.drawings()))
def test_a_drawing_is_up_to_date_and_shown(name: str) -> None:
    drawn = docs_drawings.drawings()[name]
    assert (DOCS / "images" / name).read_text(encoding="utf-8") == drawn, "run scripts/docs_drawings.py"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert f"(images/{name})" in (DOCS / "concepts.md").read_text(encoding="utf-8")


def test_the_forest_merges_context_and_never_what_was_generated() -> None:
    forest = docs_drawings.example_forest()
    assert forest.tokens == 2 + 3 + 5 + 2
    assert forest.trainable_tokens == 2 + 3 + 2


def test_the_seconds_are_those_of_whole_steps() -> None:
    stored = json.loads(docs_drawings.SECONDS.read_text(encoding="utf-8"))
    assert set(stored["metrics"]) == set(docs_drawings.PARTS)
    assert {len(values) for values in stored["metrics"].values()} == {len(stored["steps"])}
