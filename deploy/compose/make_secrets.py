"""Make the passwords, the key file and the connection strings of deploy/compose.yml; keep those that exist.

    python make_secrets.py /secrets RUN_NAME

Each folder under the first argument is mounted into the containers of one role alone. Run it as root, so
that each file belongs to the user of its container; as another user, every file belongs to that user. Only
the names of the files are printed.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

AGENTRL_USER, MONGO_USER = 10001, 999
"""User ids of AgentRL's images and of the official MongoDB image."""
HOST = "mongo:27017"
ROLES = ("sampler", "trainer", "engine", "auditor", "annotator")
_KEY_BYTES, _PASSWORD_BYTES = 378, 24


def main(arguments: list[str]) -> int:
    """Write the files and return the exit code."""
    if len(arguments) != 2:
        print("usage: python make_secrets.py FOLDER RUN_NAME", file=sys.stderr)
        return 2
    root, run_name = Path(arguments[0]), arguments[1]
    password = _kept(root / "mongo/root_password", MONGO_USER, _PASSWORD_BYTES)
    _kept(root / "mongo/keyfile", MONGO_USER, _KEY_BYTES)
    _write(root / "admin/uri", _uri("root", password, "admin"), AGENTRL_USER)
    for role in ROLES:
        user = f"agentrl_{role}"
        password = _kept(root / f"admin/{user}", AGENTRL_USER, _PASSWORD_BYTES)
        _write(root / f"{role}/uri", _uri(user, password, run_name), AGENTRL_USER)
    _kept(root / "annotator/dashboard_token", AGENTRL_USER, _PASSWORD_BYTES)
    print("\n".join(sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())))
    return 0


def _uri(user: str, password: str, source: str) -> str:
    return f"mongodb://{user}:{password}@{HOST}/?replicaSet=agentrl&authSource={source}"


def _kept(path: Path, owner: int, length: int) -> str:
    """Return the secret in ``path``; make one of ``length`` random bytes if there is none."""
    if not path.exists():
        _write(path, secrets.token_hex(length), owner)
    return path.read_text(encoding="ascii")


def _write(path: Path, text: str, owner: int) -> None:
    """Replace ``path`` atomically by a file that only ``owner`` can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if os.geteuid() == 0:
        os.chown(partial, owner, owner)
        os.chown(path.parent, owner, owner)
    path.parent.chmod(0o700)
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
