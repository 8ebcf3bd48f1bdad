"""What a starting quickstart says that it waits for."""

from agentrl.quickstart.waiting import LINE_SECONDS, Start, StartLines


def test_a_start_is_told_by_changes_and_counts_at_most_every_few_seconds():
    lines = StartLines(groups_per_step=4)
    loading, serving = Start(False, 0, 0, 0), Start(True, 0, 0, 0)
    assert lines.line(loading, 0.0) == "waiting for the engine, which loads the model (0 s)"
    assert lines.line(loading, 5.0) is None
    assert lines.line(serving, 8.0) == "the engine is ready after 8 s; the samplers begin"
    assert lines.line(Start(True, 3, 1, 0), 9.0) is None
    late = lines.line(Start(True, 12, 3, 1), 8.0 + LINE_SECONDS)
    assert late is not None
    assert "12 trajectories have a score, 3 of them are right; 1 of 4 groups are ready" in late
    trained = lines.line(Start(True, 40, 9, 5), 8.0 + 2 * LINE_SECONDS)
    assert trained is not None
    assert trained.startswith("the trainer computes its step")
    assert lines.line(Start(True, 40, 9, 5), 8.0 + 4 * LINE_SECONDS) is None
