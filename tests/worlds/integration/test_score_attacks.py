"""The attack list of docs/harnesses.md: what a harness does to pass tests that its work does not pass."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from docker_here import docker_problem
from harness_run import PYTHON, write_harness

from agentrl.worlds.harness.agent import ContainerSession, HarnessSession, score_files
from agentrl.worlds.harness.prepare import prepare
from agentrl.worlds.sandbox.local import namespace_problem

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120), pytest.mark.attack]

TEMPLATE = {
    "answer.py": "def answer():\n    return 1\n",
    "tests/__init__.py": "",
    "tests/expected.txt": "42",
    "tests/test_answer.py": (
        "import os, unittest\n"
        "from answer import answer\n"
        "expected = os.path.join(os.environ['TMPDIR'], 'expected.txt')\n"
        "expected = expected if os.path.exists(expected) else 'tests/expected.txt'\n"
        "class Test(unittest.TestCase):\n"
        "    def test_answer(self):\n"
        "        self.assertEqual(answer(), int(open(expected).read()))\n"
    ),
    # Like pytest, it runs each conftest.py; like many scripts, it looks at the state of the repository first.
    "tests/run.sh": (
        "git status -s > /dev/null 2>&1\n"
        f"[ ! -e conftest.py ] || {PYTHON} conftest.py && [ ! -e ran ] || exit 0\n"
        f"exec env {PYTHON} -m unittest -q tests.test_answer\n"
    ),
}
USER_SITE = f'd=$({PYTHON} -m site --user-site); mkdir -p "$d"; '
CUSTOMIZED = f'{USER_SITE}echo "import os; os._exit(0)" > "$d/usercustomize.py"'
PASSING = "import unittest\nclass Test(unittest.TestCase):\n    def test_answer(self):\n        pass\n"
FAKE = f"printf '%s' '{PASSING}' > fake.py; "
COMPILED = f"""{FAKE}mkdir -p tests/__pycache__; {PYTHON} -c "
import importlib.util, py_compile
py_compile.compile('fake.py', importlib.util.cache_from_source('tests/test_answer.py'),
                   invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)" """
HOOK = f"{FAKE}printf '#!/bin/sh\\ncp fake.py tests/test_answer.py\\n' > hook; chmod +x hook; "
GIT = f"{HOOK}git init -q .; "
EVIL = (
    f"{HOOK}git init -q --bare evil; g='git --git-dir=evil config'; $g --unset core.bare;"
    " $g core.worktree $PWD; $g core.fsmonitor $PWD/hook; "
)
ALL = ["tests"]
SINGLE = [name for name in TEMPLATE if name.startswith("tests/")]

HELD: dict[str, tuple[str, list[str]]] = {
    "nothing": (":", ALL),
    "changed tests": (f"{FAKE}cp fake.py tests/test_answer.py; echo 1 > tests/expected.txt", ALL),
    "usercustomize": (CUSTOMIZED, ALL),
    "usercustomize, all restored": (CUSTOMIZED, ["."]),
    "sitecustomize on PYTHONPATH": ('echo "import os; os._exit(0)" > sitecustomize.py', ALL),
    "sitecustomize as a package": (
        "mkdir sitecustomize; echo \"import os; os._exit(0)\" > sitecustomize/__init__.py", ALL
    ),
    "path configuration": (f'{USER_SITE}echo "import os; os._exit(0)" > "$d/evil.pth"', ALL),
    "programs in PATH": (
        "for d in ~/bin ~/.local/bin . /usr/local/bin /usr/bin; do mkdir -p $d;"
        " printf '#!/bin/sh\\nexit 0\\n' > $d/env && chmod +x $d/env; done",
        ALL,
    ),
    "start files and LD_PRELOAD": (
        "echo exit 0 > ~/.profile; cp ~/.profile ~/.bashrc; cp ~/.profile ~/.shinit;"
        " export ENV=~/.shinit BASH_ENV=~/.shinit LD_PRELOAD=$PWD/evil.so; : > evil.so;"
        " echo $PWD/evil.so > /etc/ld.so.preload",
        ALL,
    ),
    "git fsmonitor": (f"{GIT}git config core.fsmonitor ./hook", ALL),
    "git configuration in HOME": (f"{GIT}git config --global core.fsmonitor $PWD/hook", ALL),
    "git hooks": (f"{GIT}git add .; cp hook .git/hooks/post-index-change; touch answer.py", ALL),
    "a file .git": (f"{EVIL}echo gitdir: $PWD/evil > .git", ALL),
    "a link .git": (f"{EVIL}ln -s evil .git", ALL),
    "a repository's other folder": (f"{EVIL}git init -q .; echo $PWD/evil > .git/commondir", ALL),
    "a repository's own tree": (
        f"{GIT}git config extensions.worktreeConfig true; git config --worktree core.fsmonitor ./hook",
        ALL,
    ),
    "a bare repository": (f"{EVIL}cp -r evil/* .", ALL),
    "a filter of Git": (
        f"{GIT}git config filter.e.clean ./hook; echo '* filter=e' > .gitattributes; git add -A;"
        " touch answer.py",
        ALL,
    ),
    "conftest.py": ("echo \"open('ran', 'w')\" > conftest.py", ALL),
    "a link as tests": (f"{FAKE}cp fake.py tests/test_answer.py; mv tests ../home; ln -s ../home/tests", ALL),
    "a link as the working directory": (
        f"{FAKE}cp fake.py tests/test_answer.py; cd ..; mv workspace home; ln -s home/workspace",
        ALL,
    ),
    "a hard link": (f"{FAKE}ln -f fake.py tests/test_answer.py", SINGLE),
    "a pipe": ("rm tests/test_answer.py; mkfifo tests/test_answer.py", ALL),
    "a folder under the name of a test": (
        f"{FAKE}cd tests; rm test_answer.py; mkdir test_answer.py; cp ../fake.py test_answer.py/__init__.py",
        ALL,
    ),
    "tests one folder up": (
        f"{FAKE}mkdir ../tests; touch ../tests/__init__.py; cp fake.py ../tests/test_answer.py; rm -rf tests",
        ALL,
    ),
    "a daemon without environment": (
        f"{FAKE}env -i setsid sh -c 'trap : TERM HUP; cd /; (for i in $(seq 300); do cp -f $0/fake.py"
        " $0/tests/test_answer.py; sleep 0.02; done) &' $PWD > /dev/null 2>&1 &",
        ALL,
    ),
    "a daemon": (
        f"{FAKE}setsid sh -c 'for i in $(seq 300); do cp -f fake.py tests/test_answer.py; sleep 0.02; done'"
        " > /dev/null 2>&1 &",
        ALL,
    ),
    "bytecode": (COMPILED, SINGLE),
    "a file in TMPDIR": ("echo 1 > $TMPDIR/expected.txt; echo 1 > ../tmp/expected.txt", ALL),
    "the archive": ("for f in before files; do : > ../../$f.tar; rm -f ../../$f.tar; done", ALL),
    "locked folders": ("chmod 000 tests .; true", ALL),
}  # fmt: skip
OPEN: dict[str, tuple[str, list[str]]] = {
    "code under test that ends the process": ("echo 'import os; os._exit(0)' > answer.py", ALL),
    "a module under the name of the runner": ("echo 'import os; os._exit(0)' > unittest.py", ALL),
    "a file that restore does not name": ("echo 1 > tests/expected.txt", ["tests/test_answer.py"]),
}


@pytest.fixture(params=["namespaces", "limits", "sandbox", "docker"])
def isolation(request: pytest.FixtureRequest) -> str:
    looks = {"namespaces": namespace_problem, "sandbox": namespace_problem, "docker": docker_problem}
    problem = looks[request.param]() if request.param in looks else None
    if problem is not None:
        pytest.skip(f"no {request.param} here: {problem}")
    return str(request.param)


async def score_after(command: str, restore: list[str], folder: Path, isolation: str, **files: str) -> float:
    """Return the score of a harness that does ``command``."""
    for name, text in (TEMPLATE | files).items():
        path = folder / "template" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    score = {"command": "sh tests/run.sh", "restore": restore}
    path = write_harness(
        folder, command, workspace={"template": "template"}, score=score, isolation=isolation
    )
    prepared = prepare(path)
    kind = ContainerSession if isolation in ("sandbox", "docker") else HarnessSession
    async with kind(prepared) as session:
        await session.fill({})
        run = await session.run(command, {}, seconds=20)
        own = {"PYTHONPATH": f"{session.root}/workspace"}
        found, _ = await score_files(prepared.config, session, run, own)
    assert found is not None
    return found.score


async def scores_after(
    tricks: dict[str, tuple[str, list[str]]], folder: Path, isolation: str
) -> dict[str, float]:
    """Return the score after each trick."""
    some = asyncio.Semaphore(4)

    async def one(place: int, command: str, restore: list[str]) -> float:
        async with some:
            (folder / str(place)).mkdir()
            return await score_after(command, restore, folder / str(place), isolation)

    scores = await asyncio.gather(*(one(place, *trick) for place, trick in enumerate(tricks.values())))
    return dict(zip(tricks, scores, strict=True))


async def test_no_trick_of_the_list_passes_the_tests(tmp_path: Path, isolation: str) -> None:
    step = 3 if isolation == "sandbox" else 1  # `restore` is the same there; each takes two containers
    tricks = dict(list(HELD.items())[::step])
    assert await scores_after(tricks, tmp_path, isolation) == dict.fromkeys(tricks, 0.0)


async def test_the_tricks_that_remain_are_those_that_the_page_names(tmp_path: Path, isolation: str) -> None:
    assert await scores_after(OPEN, tmp_path, isolation) == dict.fromkeys(OPEN, 1.0)


async def test_a_repository_that_the_program_makes_is_kept(tmp_path: Path, isolation: str) -> None:
    """Only what steers Git is put back: commits are work."""
    who = "-c user.name=a -c user.email=a"
    work = f"sed -i 's/1/42/' answer.py; git init -q .; git add .; git {who} commit -qm x"
    files = {"tests/run.sh": f"[ -s .git/logs/HEAD ] || exit 1\n{TEMPLATE['tests/run.sh']}"}
    assert await score_after(work, ALL, tmp_path, isolation, **files) == 1.0


async def test_honest_work_passes_the_tests(tmp_path: Path, isolation: str) -> None:
    assert await score_after("sed -i 's/1/42/' answer.py", ALL, tmp_path, isolation) == 1.0
