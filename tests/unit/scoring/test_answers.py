"""Test the extraction of final answers by schema."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.scoring.answers import extract_answer


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("<answer> 4 </answer>", "answer", "4"),
        ("<answer>3</answer> no, <answer>4</answer>", "answer", "4"),
        ("<answer>unfinished <answer>4</answer>", "answer", "4"),
        ("<answer>two\nlines</answer>", "answer", "two\nlines"),
        ("<think><answer>1</answer></think>none yet", "answer", None),
        ("<think>x</think><answer>2</answer>", "answer", "2"),
        ("<answer></answer>", "answer", ""),
        ("no answer", "answer", None),
        ("<result>5</result><answer>4</answer>", "result", "5"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"),
        (r"\fbox{7}", "boxed", "7"),
        (r"\boxed{1} \fbox{7}", "boxed", "1"),
        (r"\boxed{\{1, 2\}}", "boxed", r"\{1, 2\}"),
        (r"\boxed{1} \boxed{2", "boxed", "1"),
        (r"\boxed 4", "boxed", None),
        ("#### Step 1\n48/2 = 24\n#### 72", "####", "72"),
        ("#### 5\n#### $1,234.50.", "####", "1,234.50"),
        ("72", "####", None),
    ],
)
def test_last_marked_answer(text: str, schema: str, expected: str | None) -> None:
    assert extract_answer(text, schema) == expected


@pytest.mark.parametrize("schema", ["", "two words", "<answer>", "4th"])
def test_a_schema_that_is_no_word(schema: str) -> None:
    with pytest.raises(ConfigError, match="answer_schema is"):
        extract_answer("", schema)
