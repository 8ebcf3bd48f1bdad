"""Run ``uv pip install`` with the settings of pip, which uv does not read.

    VENV/bin/python scripts/lib/uv_install.py UV ARGUMENT…

It installs into the environment of this Python, whose pip it asks. Exits with 3 if uv has no such setting.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

VARIABLES = {
    "index-url": ("UV_INDEX_URL", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "proxy": ("ALL_PROXY", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
"""The variable that stands for a setting, and what separates its values; options on the command line win."""
SAME_RESULT = {
    "cache-dir", "config-file", "disable-pip-version-check", "no-cache-dir", "no-color", "no-input",
    "no-python-version-warning", "no-warn-script-location", "prefer-binary", "progress-bar", "quiet",
    "require-virtualenv", "retries", "root-user-action", "verbose",
}  # fmt: skip
"""Settings that change no installed file."""


def read_settings() -> dict[str, str]:
    """Return pip's settings for ``pip install``; a variable wins over a file."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    loud = {**os.environ, "PIP_QUIET": "0"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=loud)
    pairs = [line.partition("=")[::2] for line in done.stdout.splitlines()]
    return {
        name.removeprefix(section): ast.literal_eval(value)
        for section in ("global.", "install.", ":env:.")
        for name, value in pairs
        if name.startswith(section)
    }


def main() -> None:
    """Set uv's variables, then become uv."""
    uv, *arguments = sys.argv[1:]
    settings = read_settings()
    constraints = settings.pop("constraint", "").split()
    unknown = sorted(settings.keys() - VARIABLES.keys() - SAME_RESULT)
    if unknown:
        print(f"uv has no such setting as pip's {', '.join(unknown)}", file=sys.stderr)
        sys.exit(3)
    for name in settings.keys() & VARIABLES.keys():
        variable, separator = VARIABLES[name]
        os.environ[variable] = separator.join(settings[name].split())
    # Like pip, take the best version that any index has.
    options = ["--python", sys.executable, "--index-strategy", "unsafe-best-match"]
    options += [word for path in constraints for word in ("--constraint", path)]
    os.execv(uv, [uv, "pip", "install", *options, *arguments])


if __name__ == "__main__":
    main()
