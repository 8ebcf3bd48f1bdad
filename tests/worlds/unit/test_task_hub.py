"""``hf://``: a server with the hub's API, and the cache without network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.errors import TaskFileError
from agentrl.rollout.load_tasks import read_task_source
from agentrl.worlds.task_tables import open_hub

SHA = "0123456789abcdef0123456789abcdef01234567"
README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
# GSM8K
"""


def rows(name: str, count: int, **more: Any) -> bytes:
    lines = [{"question": f"{name} {at}?", "answer": f"so\n#### {at}", **more} for at in range(count)]
    return "\n".join(map(json.dumps, lines)).encode()


FILES = {
    "README.md": README.encode(),
    "gsm8k.py": b"raise SystemExit('never run')",
    "main/train-00000-of-00001.jsonl": rows("train", 5),
    "main/test-00000-of-00001.jsonl": rows("test", 2),
    "socratic/train-00000-of-00001.jsonl": rows("socratic", 1, scorer="os.path:join"),
}


class _Hub(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        api = "/api/datasets/openai/gsm8k"
        if self.path.startswith((f"{api}/revision/", f"{api}?")) or self.path == api:
            siblings = [{"rfilename": name} for name in FILES]
            self._send(json.dumps({"id": "openai/gsm8k", "sha": SHA, "siblings": siblings}).encode())
        elif self.path.startswith(f"{api}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self._send(json.dumps(entries).encode())
        elif self.path.startswith(f"/datasets/openai/gsm8k/resolve/{SHA}/"):
            self._send(FILES[self.path.partition(f"{SHA}/")[2]])
        else:
            self.send_error(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


READS = """
import sys
from agentrl.rollout.load_tasks import read_task_source
from agentrl.errors import AgentRLError
for source in sys.argv[1:]:
    split = "eval" if source.startswith("eval=") else "train"
    try:
        tasks = read_task_source(source.removeprefix("eval="), split=split, shuffle=False).tasks
        print(len(tasks), tasks[0].query, tasks[0].answer)
    except AgentRLError as error:
        print(error.message, "→", error.hint)
"""


def test_a_split_is_downloaded_and_read_from_the_cache_without_network(hub: str, tmp_path: Path) -> None:
    sources = [
        "hf://openai/gsm8k/main", "eval=hf://openai/gsm8k/main", f"hf://openai/gsm8k/main@{SHA}:test",
        "hf://openai/gsm8k", "hf://openai/gsm8k/main:dev", "hf://openai/gsm8k/socratic:train", "hf://a/none",
    ]  # fmt: skip

    def run(endpoint: str) -> list[str]:
        environment = {
            **os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", READS, *sources],
            env=environment, capture_output=True, text=True, timeout=90, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    printed = run(hub)
    assert printed[:3] == ["5 train 0? 0", "2 test 0? 0", "2 test 0? 0"]
    assert "has several configurations: main, socratic → write hf://ORG/NAME/main" in printed[3]
    assert "has no split 'dev'; it has test, train" in printed[4]
    assert "others write this data" in " ".join(printed[5:])
    assert "hf://a/none cannot be downloaded" in printed[-1]
    assert not [path for path in _Hub.asked if path.endswith(".py")]
    assert "the hub cannot be reached" not in printed[-1]
    unreached = run("http://127.0.0.1:9")
    assert unreached[:3] == printed[:3]
    assert "hf://a/none cannot be downloaded: the hub cannot be reached, and it is not in" in unreached[-1]


def test_a_cached_revision_is_read_offline_and_a_bad_address_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "datasets--squad"
    for name, data in FILES.items():
        if name.startswith("main/"):
            path = repository / "snapshots" / SHA / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SHA)
    assert len(read_task_source("hf://squad:train").tasks) == 5
    with pytest.raises(TaskFileError, match="hf://absent cannot be downloaded: HF_HUB_OFFLINE is set, and"):
        read_task_source("hf://absent")
    with pytest.raises(TaskFileError, match="not the address of a data set"):
        open_hub("hf://a b", "train")
