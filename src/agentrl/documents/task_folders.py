"""Find the files of one split in a folder of data, or in a repository of the Hugging Face hub."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from agentrl.documents.base import excerpt
from agentrl.documents.task_source import TaskSource
from agentrl.documents.task_tables import kind_of_file, kind_of_name, open_tables
from agentrl.errors import TaskFileError, nearest

SPLITS: Final[Mapping[str, str]] = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test",
    "evaluation": "test", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation",
}  # fmt: skip
"""Words in the names of files and folders → the split that they name."""
_NOT_DATA = frozenset({"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
_SHOWN = 20
_README_BYTES = 2**20


def open_files(text: str, wanted: str) -> TaskSource:
    """Open a task file of any kind, or ``FOLDER[:SPLIT]``; ``wanted`` is the split without ``:SPLIT``.

    Raises TaskFileError if it cannot be read.
    """
    path, split = Path(text), None
    if not path.exists() and ":" in text:
        folder, _, name = text.rpartition(":")
        if Path(folder).is_dir():
            path, split = Path(folder), name
    if path.is_dir():
        files = files_of_folder(path, split, wanted)
        return open_tables(files, Path(text), folder=files[0].parent)
    return TaskSource(path) if kind_of_file(path) == "json" else open_tables([path], path)


def files_of_folder(folder: Path, split: str | None, wanted: str) -> list[Path]:
    """Return the files of a split, also as the library ``datasets`` saves them. Raises TaskFileError."""
    saved = folder / "dataset_dict.json"
    if saved.is_file():
        splits = {name: folder / name for name in _names_in(saved, _read_json(saved).get("splits"))}
        return files_of_folder(choose(splits, split, wanted, str(folder)), None, wanted)
    state = folder / "state.json"
    if state.is_file():
        files = _read_json(state).get("_data_files")
        named = [item.get("filename") if isinstance(item, dict) else item for item in _list(files)]
        return [folder / name for name in _names_in(state, named)]
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    found = find_files(names, lambda name: read_plain(folder / name), str(folder))
    return [folder / name for name in found.files(None, split, wanted)]


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The data files of a folder by configuration and split."""

    configs: Mapping[str, Mapping[str, Sequence[str]]]
    where: str

    def files(self, config: str | None, split: str | None, wanted: str) -> Sequence[str]:
        """Return the files of a split, all of one kind. Raises TaskFileError for an unknown one."""
        splits = self.configs.get("default") if config is None else self.configs.get(config)
        if splits is None:
            names = sorted(self.configs)
            if config is None and len(names) == 1:
                splits = self.configs[names[0]]
            else:
                shown = ", ".join(names[:_SHOWN])
                asked = "has several configurations" if config is None else f"has no configuration {config!r}"
                raise TaskFileError(
                    f"{self.where} {asked}: {shown}",
                    hint=f"write hf://ORG/NAME/{names[0]}[:SPLIT], in quotes",
                )
        files: Sequence[str] = choose(splits, split, wanted, self.where)
        kinds = {kind_of_name(name) for name in files}
        if len(kinds) > 1:
            raise TaskFileError(
                f"{self.where} has files of several kinds for one split: {', '.join(files[:_SHOWN])}",
                hint="give one of the files",
            )
        return files


def choose(splits: Mapping[str, Any], split: str | None, wanted: str, where: str) -> Any:
    """Return what ``splits`` has for ``split``; without one for ``wanted``, or the only one there is."""
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    name = wanted if split is None else split
    for key in (name, SPLITS.get(name, name)):
        if key in splits:
            return splits[key]
    has = ", ".join(sorted(splits)[:_SHOWN]) or "none"
    raise TaskFileError(
        f"{where} has no split {name!r}; it has {has}",
        hint=nearest(name, splits) or "name one behind a colon, such as FOLDER:test or hf://ORG/NAME:test",
    )


def find_files(names: Sequence[str], read: Callable[[str], str], where: str) -> DataFiles:
    """Return the data files among ``names`` by configuration and split.

    The metadata of README.md name them, as on the hub; otherwise words in the paths do, such as
    ``data/train-0.parquet`` and ``main/test/0000.parquet``. A path without such a word is of the split train.
    Raises TaskFileError.
    """
    data = [
        name for name in names
        if kind_of_name(name) and PurePosixPath(name).name not in _NOT_DATA
        and not any(part.startswith(".") for part in PurePosixPath(name).parts)
    ]  # fmt: skip
    if not data:
        script = any(name.endswith(".py") for name in names)
        raise TaskFileError(
            f"{where} has no Parquet, Arrow, CSV or JSON files"
            + (", and its Python script is not run" if script else ""),
            hint="hf://ORG/NAME@refs/convert/parquet is the hub's own copy of many data sets as Parquet",
        )
    configs = _named(data, read("README.md")) if "README.md" in names else {}
    if not configs:
        for name in data:
            config, split = _place(PurePosixPath(name))
            configs.setdefault(config, {}).setdefault(split, []).append(name)
    return DataFiles(configs, where)


def _named(data: Sequence[str], readme: str) -> dict[str, dict[str, list[str]]]:
    """Return the files that the metadata of README.md name."""
    front = re.match(r"---\n(.*?)\n---", readme, re.DOTALL)
    try:
        metadata = yaml.safe_load(front.group(1)) if front else None
    except (yaml.YAMLError, RecursionError):
        metadata = None
    found: dict[str, dict[str, list[str]]] = {}
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    for config in configs if isinstance(configs, list) else ():
        given = config.get("data_files") if isinstance(config, dict) else None
        items = given if isinstance(given, list) else [given]
        for item in items:
            entry = item if isinstance(item, dict) else {"split": "train", "path": item}
            paths = entry.get("path")
            patterns = [*filter(None, map(_name, paths if isinstance(paths, list) else [paths]))]
            files = [name for name in data if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
            if files:
                config_name, split = config.get("config_name", "default"), entry.get("split", "train")
                if _name(config_name) and _name(split):
                    found.setdefault(_name(config_name), {})[_name(split)] = files
    return found


def _place(path: PurePosixPath) -> tuple[str, str]:
    """Return the configuration and the split of a file by its path."""
    folders = [part for part in path.parts[:-1] if part != "data"]
    words = re.split(r"[._-]", path.name)
    split = next((SPLITS[word] for word in words if word in SPLITS), None)
    for folder in folders:
        if split is None and folder in SPLITS:
            split = SPLITS[folder]
    others = [folder for folder in folders if folder not in SPLITS]
    return others[0] if others else "default", split or "train"


def read_plain(path: Path) -> str:
    """Return the first MiB of a README, which may hold anything."""
    with path.open("rb") as file:
        return file.read(_README_BYTES).decode("utf-8", "replace")


def _name(value: object) -> str:
    """Return a name; empty for a list or object: YAML aliases can expand one to gigabytes of text."""
    return str(value) if isinstance(value, (str, int, float)) else ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _names_in(file: Path, names: object) -> list[str]:
    """Return names of files or folders beside ``file``, which lists them. Raises TaskFileError for others."""
    for name in _list(names):
        if not isinstance(name, str) or name in ("", ".", "..") or PurePosixPath(name).name != name:
            raise TaskFileError(
                f"{file} names {excerpt(name, _SHOWN * 4)}, which is nothing beside it",
                hint="save the data set again, by save_to_disk of the library datasets",
            )
    return _list(names)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TaskFileError(f"{path} cannot be read: {error}", hint="save the data set again") from error
    return value if isinstance(value, dict) else {}
