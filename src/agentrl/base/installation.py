"""What is installed: the packages that extras bring, and the files that AgentRL ships.

    python -m agentrl.base.installation                        # print their folder
    python -m agentrl.base.installation demo/units.py …        # run a program among them

They are in a clone of the repository, and in ``agentrl/assets/`` of a wheel: ``setup.py`` copies them.
"""

from __future__ import annotations

import importlib.util
import runpy
import shlex
import sys
from pathlib import Path

from agentrl.errors import ConfigError

_EXTRAS = {
    "accelerate": "trainer",
    "aiohttp": "buckets",
    "cloudpickle": "notebook",
    "gcsfs": "gcs",
    "gguf": "trainer",
    "math_verify": "math",
    "matplotlib": "plots",
    "pandas": "notebook",
    "peft": "trainer",
    "pyarrow": "parquet",
    "s3fs": "buckets",
    "safetensors": "trainer",
    "torch": "trainer",
    "transformers": "trainer",
}
_FILES = {None: ("base", "dashboard", "sampler"), "quickstart": ("trainer", "mongo", "plots")}
"""The files of requirements of the plain installation, and of the extra that has no file of its own name."""
_GPUS = ("/dev/nvidiactl", "/dev/kfd")
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_SAMPLER = (
    "PIL", "fsspec", "httptools", "httpx2", "huggingface_hub", "jsonschema", "mcp", "opentelemetry",
    "referencing", "renderers", "tokenizers", "websockets", "xxhash", "zstandard",
)  # fmt: skip
"""What the plain installation has and a machine that shows the dashboard alone lacks (docs/install.md)."""


def missing(module: str, what: str) -> ConfigError | None:
    """Return the error that says how to install ``module``, which ``what`` needs; None for another's one."""
    name = module.partition(".")[0]
    if name not in _EXTRAS and name not in _SAMPLER:
        return None
    return ConfigError(
        f"{what} needs the package {name.replace('_', '-')}, which is not installed",
        hint=how_to_install(_EXTRAS.get(name)),
    )


def how_to_install(extra: str | None = None) -> str:
    """Return the command that installs what ``extra`` brings; None: what the plain installation has.

    It names shipped files, so that it works before AgentRL is on an index, where ``agentrl`` is another
    project's name. Without a GPU it takes torch for CPUs: a local version, as ``+cpu``, sorts above its own.
    """
    root = clone()
    folder = (root if root is not None else shipped_files()) / "requirements"
    names = _FILES.get(extra, (extra,))
    words = [word for name in names for word in ("-r", str(folder / f"{name}.txt"))]
    if "trainer" in names and not any(Path(device).exists() for device in _GPUS):
        words = ["--extra-index-url", _CPU_INDEX, *words]
    return shlex.join(["pip", "install", *words])


def require(module: str, what: str, extra: str | None = None) -> None:
    """Raise ConfigError unless the package ``module`` is installed. Imports nothing.

    ``extra`` is the one that brings all that ``what`` needs, if it is not that of ``module``.
    """
    error = missing(module, what)
    if error is not None and importlib.util.find_spec(module) is None:
        raise error if extra is None else ConfigError(error.message, hint=how_to_install(extra))


_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_files() -> Path:
    """Return the folder of the shipped files. Raises ConfigError if the installation has none."""
    for folder in (_PACKAGE / "assets", _PACKAGE.parents[1] / "assets"):
        if (folder / "configs").is_dir():
            return folder
    raise ConfigError(
        f"the files that AgentRL ships are not beside {_PACKAGE}",
        hint="install AgentRL from a wheel, or with `pip install -e .` in a clone of the repository",
    )


def clone() -> Path | None:
    """Return the clone of the repository that this installation is; None for a wheel."""
    root = _PACKAGE.parents[1]
    return root if (root / "scripts" / "setup.sh").is_file() else None


def deploy_files() -> Path:
    """Return the folder with what starts SGLang and vLLM on CPUs."""
    root = clone()
    return root / "deploy" if root is not None else shipped_files() / "deploy"


def _main(words: list[str]) -> None:
    folder = shipped_files()
    if not words:
        print(folder)
        return
    sys.argv = words
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / words[0]), run_name="__main__")


if __name__ == "__main__":
    _main(sys.argv[1:])
