"""Packages that the plain installation leaves out: which extra brings each of them."""

from __future__ import annotations

import importlib.util

from agentrl.errors import ConfigError

_EXTRAS = {
    "accelerate": "trainer",
    "aiohttp": "buckets",
    "gcsfs": "gcs",
    "gguf": "trainer",
    "math_verify": "math",
    "matplotlib": "plots",
    "peft": "trainer",
    "pyarrow": "parquet",
    "s3fs": "buckets",
    "safetensors": "trainer",
    "torch": "trainer",
    "transformers": "trainer",
}
_SAMPLER = (
    "PIL", "fsspec", "httptools", "httpx2", "huggingface_hub", "jsonschema", "mcp", "opentelemetry",
    "referencing", "renderers", "tokenizers", "websockets", "zstandard",
)  # fmt: skip
"""What the plain installation has and a machine that shows the dashboard alone lacks (docs/install.md)."""


def missing(module: str, what: str) -> ConfigError | None:
    """Return the error that says how to install ``module``, which ``what`` needs; None for another's one."""
    name = module.partition(".")[0]
    if name not in _EXTRAS and name not in _SAMPLER:
        return None
    return ConfigError(
        f"{what} needs the package {name.replace('_', '-')}, which is not installed",
        hint=f"pip install 'agentrl[{_EXTRAS[name]}]'" if name in _EXTRAS else "pip install agentrl",
    )


def require(module: str, what: str, extra: str | None = None) -> None:
    """Raise ConfigError unless the package ``module`` is installed. Imports nothing.

    ``extra`` is the one that brings all that ``what`` needs, if it is not that of ``module``.
    """
    error = missing(module, what)
    if error is not None and importlib.util.find_spec(module) is None:
        raise error if extra is None else ConfigError(error.message, hint=f"pip install 'agentrl[{extra}]'")
