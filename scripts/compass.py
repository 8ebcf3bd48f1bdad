"""Add the aggregations of assets/compass to MongoDB Compass, where they appear under My Queries.

    python scripts/compass.py --run_name RUN [--folder DIR]

Compass stores each saved aggregation in a JSON file and reads the files when it starts. Files of an earlier
call for the same run are replaced; other files stay unchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import uuid
from pathlib import Path

QUESTIONS = Path(__file__).resolve().parent.parent / "assets" / "compass"
_QUERY = re.compile(r'db\.getCollection\("(?P<view>\w+)"\)\.aggregate\((?P<pipeline>\[.*\])\)', re.DOTALL)


def compass_folder() -> Path:
    """Return the data folder of Compass on this system."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "MongoDB Compass"
    if sys.platform == "win32":
        return Path(os.environ["APPDATA"]) / "MongoDB Compass"
    return Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "MongoDB Compass"


def saved_pipeline(playground: Path, run_name: str) -> dict[str, object]:
    """Return the document of a saved aggregation from a playground file."""
    text = playground.read_text(encoding="utf-8")
    query = _QUERY.search(text)
    if query is None:
        raise ValueError(f"{playground} is not one aggregation on one view")
    question = text.split("\n", 1)[0].removeprefix("// ")
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"agentrl/{run_name}/{playground.name}")),
        "name": f"{playground.name[:2]} {question}",
        "namespace": f"{run_name}.{query['view']}",
        "autoPreview": True,
        "pipelineText": query["pipeline"],
        "lastModified": int(time.time() * 1000),
    }


def main() -> int:
    """Write the files; return 1 if Compass has no data folder here and none is given."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--run_name", required=True, help="name of the run and of its database")
    parser.add_argument("--folder", type=Path, help="the data folder of Compass (default: this user's)")
    arguments = parser.parse_args()
    folder = arguments.folder or compass_folder()
    if not folder.is_dir():
        print(f"{folder} has no Compass data: start Compass once, or pass --folder", file=sys.stderr)
        return 1
    saved = folder / "SavedPipelines"
    saved.mkdir(exist_ok=True)
    for playground in sorted(QUESTIONS.glob("*.mongodb.js")):
        pipeline = saved_pipeline(playground, arguments.run_name)
        target = saved / f"{pipeline['id']}.json"
        target.write_text(json.dumps(pipeline, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{pipeline['name']}  →  {pipeline['namespace']}")
    print("Restart Compass: the aggregations are under My Queries.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
