"""Measure the house: how large its core and wings are, and what makes the core hard to read.

PYTHONPATH=tests python -m walks.house               # sizes, imports into wings, shared names of files
PYTHONPATH=tests python -m walks.house --imports     # and each import from the core into a wing
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from walks.walk import SOURCE, Walk

CORE: Final = "core"
WINGS: Final = ("lab", "local", "worlds", "screens")
"""Folders of the package that the core works without."""

CENTRAL: Final = 40
"""Number of the files that walks enter most, whose comments are counted."""

_FOR_TOOLS: Final = re.compile(r"#\s*(noqa|type:|fmt:|pragma|!)")
_MANY_MODULES: Final = ("__init__", "__main__")


class Import(NamedTuple):
    """A name that a file imports from another one."""

    importer: str
    imported: str
    name: str


def all_files() -> list[str]:
    """Return the files of the package, as `folder/file.py`."""
    return sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


def area(file: str) -> str:
    """Return the wing of a file, or the core."""
    folder = file.partition("/")[0]
    return folder if folder in WINGS else CORE


def lines_of(file: str) -> int:
    """Return the number of lines of a file."""
    return len((SOURCE / file).read_text(encoding="utf-8").splitlines())


def comments_per_1000_lines(files: Iterable[str]) -> float:
    """Return the density of ``#`` comments, without those for tools. Most of them say why."""
    lines = comments = 0
    for file in files:
        text = (SOURCE / file).read_text(encoding="utf-8")
        lines += len(text.splitlines())
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments += sum(
            each.type == tokenize.COMMENT and not _FOR_TOOLS.match(each.string) for each in tokens
        )
    return 1000 * comments / max(1, lines)


def central(walks: Iterable[Walk]) -> list[str]:
    """Return the files into which the walks make most calls from other files."""
    entered = Counter(called.file for found in walks for _, called in found.returns)
    return [file for file, _ in entered.most_common(CENTRAL)]


def shared_names() -> dict[str, list[str]]:
    """Return the names that more than two files have, and their files."""
    found: dict[str, list[str]] = {}
    for file in all_files():
        found.setdefault(file.rpartition("/")[2].removesuffix(".py"), []).append(file)
    return {name: files for name, files in found.items() if len(files) > 2 and name not in _MANY_MODULES}


def into_wings() -> list[Import]:
    """Return the imports from the core into a wing, but those for type checkers."""
    return [
        each
        for file in all_files()
        if area(file) == CORE
        for each in _imports(file)
        if area(each.imported) != CORE
    ]


def _imports(importer: str) -> Iterator[Import]:
    nodes = tuple(ast.walk(ast.parse((SOURCE / importer).read_text(encoding="utf-8"))))
    guards = [
        node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    for_checkers = {node for guard in guards for node in ast.walk(guard)}
    for node in nodes:
        if node in for_checkers or not isinstance(node, ast.ImportFrom):
            continue
        if (node.module or "").partition(".")[0] == SOURCE.name:
            for name in (alias.name for alias in node.names):
                imported = _file_of(f"{node.module}.{name}") or _file_of(str(node.module))
                if imported is not None:
                    yield Import(importer, imported, name)


def _file_of(module: str) -> str | None:
    path = SOURCE.parent / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return str(file.relative_to(SOURCE))
    return None


def report(walks: Iterable[Walk] = ()) -> str:
    """Return the measurements as lines; the comments of the central files need walks."""
    files = all_files()
    lines = [f"{'area':<8}  files    lines"]
    for name in (CORE, *WINGS):
        found = [file for file in files if area(file) == name]
        lines.append(f"{name:<8}  {len(found):>5}  {sum(map(lines_of, found)):>7,}")
    cut = into_wings()
    lines.append(f"{len({each.importer for each in cut})} files of the core import {len(cut)} names of wings")
    shared = shared_names()
    names = ", ".join(f"{name} {len(found)}" for name, found in sorted(shared.items()))
    lines.append(f"{len(shared)} names are those of more than two files: {names}")
    if most := central(walks):
        density = comments_per_1000_lines(most)
        lines.append(f"{density:.1f} comments per 1,000 lines in the {len(most)} files that are entered most")
    return "\n".join(lines)


def main() -> None:
    """Print the measurements that need no walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--imports", action="store_true", help="list the imports from the core into wings")
    arguments = parser.parse_args()
    print(report())
    if arguments.imports:
        print(*(f"{each.importer} -> {each.imported}: {each.name}" for each in into_wings()), sep="\n")


if __name__ == "__main__":
    main()
