"""Run one program in the sandbox on the streams of this process, as an MCP server over stdio needs.

It is started by a bare interpreter, once for each server. The program ends with this process, and this
process ends with its parent.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from agentrl.tools.sandbox import linux
from agentrl.tools.sandbox.launcher import run_attached
from agentrl.tools.sandbox.program import Job

_STOPPED = 128 + signal.SIGTERM


def main() -> None:
    """Run the job of the first argument, in JSON, with the variables of this process that the second names.

    Exits with the program's code, or with 1 and a reason.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_STOPPED))
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    given, names = (json.loads(word) for word in sys.argv[1:])
    job = Job(**given, environment={name: os.environ[name] for name in names})
    os.makedirs(job.directory, exist_ok=True)
    try:
        code, why = run_attached(job)
    except OSError as error:
        code, why = 1, str(error)
    if why is not None:
        print(f"the sandbox ended the program: {why}", file=sys.stderr)
    sys.exit(code if code >= 0 else 128 - code)
