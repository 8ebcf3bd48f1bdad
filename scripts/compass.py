"""Put the saved questions of assets/compass into MongoDB Compass, where they appear under My Queries.

    python scripts/compass.py --run_name RUN [--folder DIR]

Compass keeps a saved aggregation as one JSON file, and reads them all when it starts. The files of an earlier
call for the same run are replaced, and nothing else in the folder is touched.
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
    """Where Compass keeps its data on this system."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "MongoDB Compass"
    if sys.platform == "win32":
        return Path(os.environ["APPDATA"]) / "MongoDB Compass"
    return Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "MongoDB Compass"


def saved_pipeline(playground: Path, run_name: str) -> dict[str, object]:
    """A playground file as the document that Compass keeps of a saved aggregation."""
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
    """Write the files; 1 where Compass has no folder here and none was named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--run_name", required=True, help="the run's name, which is its database's")
    parser.add_argument("--folder", type=Path, help="the data folder of Compass (default: this user's)")
    arguments = parser.parse_args()
    folder = arguments.folder or compass_folder()
    if not folder.is_dir():
        print(f"Compass keeps no data in {folder}: start it once, or name its --folder", file=sys.stderr)
        return 1
    saved = folder / "SavedPipelines"
    saved.mkdir(exist_ok=True)
    for playground in sorted(QUESTIONS.glob("*.mongodb.js")):
        pipeline = saved_pipeline(playground, arguments.run_name)
        target = saved / f"{pipeline['id']}.json"
        target.write_text(json.dumps(pipeline, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{pipeline['name']}  →  {pipeline['namespace']}")
    print("Restart Compass: they are under My Queries.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
