"""MkDocs hooks: show each file of the repository that a page links to as a page of the site."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {
    ".py": "python", ".sh": "bash", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".jsonl": "json",
    ".js": "js", ".toml": "toml",
}  # fmt: skip
_HIDDEN = "---\nsearch: {exclude: true}\n---\n\n"
LARGEST = 20_000
"""Bytes of a file that a folder's page shows whole; of a larger one it shows the name."""


def on_config(config: Any) -> Any:
    """Append the pages that the contents leave out, so that every page can be reached."""
    docs = Path(config.docs_dir)
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    others = [path.relative_to(docs).as_posix() for path in sorted(docs.rglob("*.md"))]
    if left := [name for name in others if name not in named]:
        config.nav.append({"More": left})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file and folder of the repository that a page links to."""
    docs = Path(config.docs_dir)
    wanted = {
        target
        for page in docs.rglob("*.md")
        for match in LINK.finditer(page.read_text(encoding="utf-8"))
        if (target := _outside(docs, page.relative_to(docs).as_posix(), match[2])) is not None
    }
    for path in sorted(wanted):
        file = File.generated(
            config, _address(path), content=_HIDDEN + _page(docs.parent / path, path),
            inclusion=InclusionLevel.NOT_IN_NAV,
        )  # fmt: skip
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to files of the repository at their pages."""
    docs, here = Path(config.docs_dir), PurePosixPath(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        path = _outside(docs, here.as_posix(), match[2])
        if path is None:
            return match[0]
        up = "../" * (len(here.parts) - 1)
        return f"{match[1]}{up}{_address(path)})"

    return LINK.sub(replace, markdown)


def _outside(docs: Path, page: str, link: str) -> str | None:
    """Return the path in the repository of a link that leaves docs/; None for any other link."""
    target = ((docs / page).parent / link).resolve()
    root = docs.parent.resolve()
    if target.is_relative_to(docs.resolve()) or not target.is_relative_to(root) or not target.exists():
        return None
    return target.relative_to(root).as_posix()


def _address(path: str) -> str:
    return f"repository/{path}.md"


def _page(path: Path, name: str) -> str:
    if path.is_file():
        return f"# {name}\n\n{_block(path)}"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", "."], cwd=path, capture_output=True, text=True, check=True, timeout=30
    )
    parts = [f"# {name}"]
    for item in sorted(filter(None, listed.stdout.split("\0"))):
        file = path / item
        shown = file.stat().st_size <= LARGEST and file.suffix not in (".png", ".webp")
        parts.append(f"## {item}\n\n" + (_block(file) if shown else f"{file.stat().st_size:,} bytes"))
    return "\n\n".join(parts)


def _block(path: Path) -> str:
    text = path.read_text(encoding="utf-8").rstrip("\n")
    return f"````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````"
