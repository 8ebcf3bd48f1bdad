"""Write the scored trajectories of a run as a dataset for Hugging Face datasets: Parquet and a README."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from agentrl.documents.images import text_of
from agentrl.documents.model_call import DispatchedSamplingTask, conversation
from agentrl.documents.record import Record
from agentrl.documents.task import task_key
from agentrl.errors import ConfigError
from agentrl.lab.transfer import require_empty, writing_folder
from agentrl.store.mechanics.connection import DATA, RECORD, Connection, Json, Repository, database_call
from agentrl.store.model_calls import read_model_calls

FILE = "data/train.parquet"
_PAGE = 64
"""Trajectories in memory at a time; each page is a row group of the file."""
_README = """---
configs:
- config_name: default
  data_files: {file}
---

# Trajectories of the run {run}

{rows} scored trajectories, a row each. `messages` is the conversation: prompts, responses, tool results;
`tool_calls` of a message and `answer` are JSON text, and images are left out. `split` is that of the run.
`trained` says whether a committed step trained the trajectory, and `trained_at_steps` which steps did.

```python
import datasets

rows = datasets.load_dataset("FOLDER", split="train")
```
"""


def require_pyarrow() -> None:
    """Raise ConfigError without pyarrow, before anything is read."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed", hint='pip install "agentrl[parquet]"'
        ) from error


def write_parquet(rows: Sequence[Mapping[str, Any]], file: BinaryIO) -> None:
    """Write rows of the same keys; the types of the columns come from the values. Raises ConfigError."""
    require_pyarrow()
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file, compression="zstd")


class TrajectoryDataset(Repository):
    """Writes a dataset with at most a page of trajectories in memory. It only reads the database.

    ``on_rows`` is called with the number of rows of each page.
    """

    def __init__(self, connection: Connection, *, on_rows: Callable[[int], None]) -> None:
        super().__init__(connection)
        self._on_rows = on_rows

    @database_call
    async def export(self, folder: Path) -> int:
        """Write the trajectories that have a score and are not pruned into ``folder``; return their number.

        The folder must not exist or be empty, and appears when it is complete. Raises ConfigError without
        pyarrow, StoreError if the folder cannot be written.
        """
        require_pyarrow()
        require_empty(folder)
        import pyarrow
        import pyarrow.parquet

        rows = 0
        with writing_folder(folder) as temporary:
            (temporary / FILE).parent.mkdir()
            schema = _schema()
            with pyarrow.parquet.ParquetWriter(temporary / FILE, schema, compression="zstd") as writer:
                async for page in self._pages(RECORD, {"score": {"$ne": None}, "pruned_at": None}, _PAGE):
                    written = await self._rows([Record.from_document(document) for document in page])
                    writer.write_table(pyarrow.Table.from_pylist(written, schema=schema))
                    rows += len(page)
                    self._on_rows(len(page))
            readme = _README.format(file=FILE, run=self._connection.database.name, rows=f"{rows:,}")
            (temporary / "README.md").write_text(readme, encoding="utf-8")
        return rows

    async def _rows(self, records: Sequence[Record]) -> list[Json]:
        ids = [record.id for record in records]
        calls = await read_model_calls(self._connection, ids)
        data = self._collection(DATA).find({"_id": {"$in": ids}}, {"trained_at_steps": 1})
        steps = {document["_id"]: document["trained_at_steps"] async for document in data}
        return [_row(record, calls[record.id], steps.get(record.id, ())) for record in records]


def _row(record: Record, calls: Sequence[DispatchedSamplingTask], steps: Sequence[int]) -> Json:
    return {
        "id": record.id, "task_id": record.task.removeprefix(task_key(record.split, record.epoch, "")),
        "split": record.split, "epoch": record.epoch,
        "query": record.query, "answer": _json(record.answer), "final_answer": record.final_answer,
        "messages": [*map(_message, conversation(calls))], "score": record.score,
        "advantage": record.advantage,
        "status": record.shown_status, "trained": record.trained_count > 0, "trained_at_steps": list(steps),
        "min_policy_version": record.min_version, "max_policy_version": record.max_version,
        "turns": record.turns, "tool_calls": record.tool_calls, "generated_tokens": record.generated_tokens,
        "stop_reason": None if record.stop_reason is None else str(record.stop_reason),
        "created_at": record.created_at,
    }  # fmt: skip


def _message(message: Mapping[str, Any]) -> Json:
    thought, calls = message.get("reasoning_content"), message.get("tool_calls")
    return {
        "role": str(message.get("role", "?")),
        "content": str(text_of(message.get("content"))),
        "reasoning_content": None if thought is None else str(text_of(thought)),
        "tool_calls": _json(calls) if calls else None,
    }


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _schema() -> Any:
    """Return the columns; messages have the same fields in every row."""
    import pyarrow as pa

    message = pa.struct(
        [(name, pa.string()) for name in ("role", "content", "reasoning_content", "tool_calls")]
    )
    text, whole, real = pa.string(), pa.int64(), pa.float64()
    return pa.schema(
        {
            "id": text, "task_id": text, "split": text, "epoch": whole, "query": text, "answer": text,
            "final_answer": text, "messages": pa.list_(message), "score": real, "advantage": real,
            "status": text, "trained": pa.bool_(), "trained_at_steps": pa.list_(whole),
            "min_policy_version": whole, "max_policy_version": whole, "turns": whole, "tool_calls": whole,
            "generated_tokens": whole, "stop_reason": text, "created_at": pa.timestamp("ms", tz="UTC"),
        }
    )  # fmt: skip
