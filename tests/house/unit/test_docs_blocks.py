"""Fenced blocks of the documentation: Python runs, data are read by our readers, commands are parsed.

A block that cannot run has the reason in a comment right above it: ``<!-- not run: REASON -->``.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import itertools
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_pages import PAGES, ROOT, Block, blocks, write_files

from agentrl.config import load
from agentrl.config.commands import COMMANDS, function_of
from agentrl.documents.task_json import make_task
from agentrl.errors import ConfigError

BLOCKS = [block for page in PAGES for block in blocks(page)]
KNOWN = {"python", "json", "yaml", "toml", "bash", "js", ""}
ENDS = {"&", "&&", "|", "||", ";", ">", ">>", "2>"}
"""Words that end a command within a line."""
EXAMPLES = sorted((ROOT / "assets" / "examples").glob("*/run.sh"))
LAUNCHERS = ("torchrun", "accelerate")


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def test_every_block_has_a_known_language() -> None:
    assert [str(block) for block in BLOCKS if block.language not in KNOWN] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with a title are files that the page's other blocks import."""
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        code = compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if block.title is not None:
            importlib.import_module(block.title.removesuffix(".py"))
        elif block.not_run is None:
            result = eval(code, names)
            if inspect.iscoroutine(result):
                asyncio.run(result)


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_is_json_and_tasks_are_tasks(block: Block) -> None:
    decoder, position, text = json.JSONDecoder(), 0, block.text.strip()
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        if isinstance(value, dict) and ({"query", "scorer"} & value.keys()) and block.not_run is None:
            value.pop("images", None)  # of no file here
            make_task(value, split="train", num_generations=8, folder=ROOT)
        position += len(text[position:]) - len(text[position:].lstrip())


@pytest.mark.parametrize("block", of("yaml", "toml"), ids=str)
def test_yaml_and_toml_can_be_read(block: Block) -> None:
    if block.language == "toml":
        assert tomllib.loads(block.text)
    else:
        assert yaml.safe_load(block.text)


@pytest.mark.parametrize("block", of("bash"), ids=str)
def test_bash_is_bash_and_its_flags_exist(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(block.page, tmp_path)
    monkeypatch.chdir(tmp_path if any(tmp_path.iterdir()) else ROOT)
    done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, timeout=30)
    assert done.stderr == ""
    if block.not_run is None:
        for words in commands(block.text):
            check_command(words)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.parent.name)
def test_the_commands_of_an_example_exist(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``"$run"`` is its name of a run, and what only bash knows is left out."""
    monkeypatch.chdir(ROOT)
    text = script.read_text(encoding="utf-8")
    done = subprocess.run(["bash", "-n", script], text=True, capture_output=True, timeout=30)
    assert done.stderr == ""
    for words in commands(re.sub(r"\$\{?run\b\}?", "example", text)):
        check_command([word for word in words if not word.startswith("${")])


def test_the_commands_in_prose_exist() -> None:
    found = [
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"`agentrl ([a-z]+)\b", page.read_text(encoding="utf-8"))
    ]
    assert [(page, name) for page, name in found if name not in COMMANDS] == []


def commands(text: str) -> list[list[str]]:
    """Return the words of every ``agentrl`` command of a script, variables left as they are."""
    variables = dict(re.findall(r'^(\w+)="([^"]*)"', text, re.MULTILINE))
    text = re.sub(r'^\w+="[^"]*"$', "", text, flags=re.MULTILINE)
    for name, value in variables.items():
        text = text.replace(f"${name}", " ".join(value.split()))
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace("…", ""), comments=True)
        while words and (re.match(r"\w+=", words[0]) or words[0] in ("$", "python")):
            words = words[1:]
        words = list(itertools.takewhile(lambda word: word not in ENDS, words))
        if words[:1] == ["agentrl"]:
            found.append(words[1:])
        elif words[:1] and words[0] in LAUNCHERS and "agentrl.train" in words:
            found.append(["train", *words[words.index("agentrl.train") + 1 :]])
    return found


class _ParsedError(Exception):
    """The flags of a command were parsed, so it need not run."""


def check_command(words: Sequence[str]) -> None:
    """Parse a command as the terminal would. Raises ConfigError for an unknown command, flag or value."""
    assert words[0] in COMMANDS, f"no command {words[0]}"
    run = function_of(words[0])
    module = importlib.import_module(run.__module__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load.CommandParser, "parse_args", _stopping(load.CommandParser.parse_args))
        for name in ("parse", "load_parse"):
            if hasattr(module, name):
                patch.setattr(module, name, _stopping(load.parse))
        with pytest.raises(_ParsedError):
            run(list(words[1:]))


def _stopping(parse: Any) -> Any:
    def stop(*arguments: Any, **named: Any) -> None:
        if "validate" in inspect.signature(parse).parameters:
            named["validate"] = None
        try:
            parse(*arguments, **named)
        except ConfigError as error:
            if "cannot be read" not in str(error):
                raise
        raise _ParsedError

    return stop
