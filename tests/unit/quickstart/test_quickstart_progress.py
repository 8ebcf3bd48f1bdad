"""Progress of downloads and conversions, on a terminal and elsewhere."""

import pytest

from agentrl.quickstart.progress import folder_bytes, state_text, working


def test_a_block_is_reported_at_its_start_and_its_end():
    lines: list[str] = []
    with working("converting", lines.append):
        assert lines == ["converting"]
    assert lines[1:] == ["converting: done in 0 s"]


def test_a_block_that_fails_is_not_done():
    lines: list[str] = []
    with pytest.raises(ValueError, match="broken"), working("converting", lines.append):
        raise ValueError("broken")
    assert lines == ["converting", "converting: failed after 0 s"]


def test_the_folder_shows_how_much_is_there(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "file").write_bytes(bytes(3_000_000))
    assert folder_bytes(tmp_path) == 3_000_000
    assert state_text("downloading", 12.4, 3_000_000, 93_000_000) == "downloading: 3 of 93 MB, 12 s"
    assert state_text("converting", 12.4, None, None) == "converting: 12 s"
