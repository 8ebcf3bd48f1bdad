"""The YAML file of a harness: what it says, what is refused before a claim; and the scores that it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.documents.record import Ending
from agentrl.errors import ConfigError, HarnessError
from agentrl.rollout.agent_io import agent_cfg_path
from agentrl.rollout.agents import check_agent
from agentrl.worlds.harness.agent import _read_score
from agentrl.worlds.harness.prepare import HarnessConfig, HarnessFile, find_program, folders_of, prepare

BAD = {
    "[": (":1 is not YAML: expected the node content", "correct that line"),
    "- a": ("the file is ['a']; it must be a mapping", "docs/harnesses.md"),
    "isolation: auto": ("'command' is missing", "docs/harnesses.md"),
    "# A comment.\ncomand: x": (":2: unknown key 'comand'", "did you mean 'command'"),
    "command: ''": ("command is ''", "a line for the shell"),
    "command: 'echo \"'": ("cannot be read as a shell line", "close its quotes"),
    "command: no-such-agent --now": ("no command 'no-such-agent'", "install it"),
    "command: [no-such-agent]": ("no command 'no-such-agent'", "install it"),
    "{command: 'true', limits: {seconds: -1}}": ("limits.seconds is -1", "must be above 0"),
    "{command: 'true', limits: {memory_mb: much}}": ("limits.memory_mb is 'much'", "must be a whole number"),
    "{command: 'true', limits: {second: 1}}": ("unknown key 'limits.second'", "did you mean 'seconds'"),
    "{command: 'true', isolation: dokcer}": ("unknown container back end 'dokcer'", "did you mean 'docker'"),
    "{command: 'true', isolation: docker}": ("the back end 'docker' needs an image", "image: NAME"),
    "{command: 'true', isolation: sandbox}": ("needs a root file system", "docker export"),
    "{command: 'true', image: python}": ("image is 'python'", "which starts no container"),
    "{command: 'true', isolation: docker, image: python}": ("only the gateway", "network: host"),
    "{command: 'true', isolation: docker, image: a, path: [x]}": ("path is ['x']", "into the image"),
    "{command: 'true', isolation: docker, image: python, network: none}": (
        "network is 'none'", "the gateway is reachable",
    ),
    "{command: 'true', workspace: {template: nowhere}}": (
        "workspace.template is 'nowhere'", "must be an existing folder",
    ),
    "{command: 'true', workspace: {template: ., bundle: x}}": ("workspace is", "not both"),
    "{command: 'true', workspace: {bundle: bad.bundle}}": ("cannot be checked out", "git bundle create"),
    "{command: 'true', pass_environment: [NOT_SET_HERE]}": ("'NOT_SET_HERE', which is not set", "export"),
    "{command: 'true', environment: {AGENTRL_MODEL: x}}": ("has the key 'AGENTRL_MODEL'", "none with"),
    "{command: 'true', environment: {A: [1]}}": ("environment.A is [1]", "must be text"),
    "{command: 'true', files: {../x: y}}": ("files has the key '../x'", "below the working directory"),
    "{command: 'true', score: points}": ("score is 'points'", "'scorer', 'exit_code' or 'reward'"),
    "{command: 'true', score: {command: absent-tests}}": ("score.command: there is no", "install it"),
    "{command: 'true', score: exitcode}": ("score is 'exitcode'", "did you mean 'exit_code'"),
    "{command: 'true', score: {file: a, command: b}}": ("score is {'file'", "{file: PATH} or {command: …}"),
    "{command: 'true', score: {command: 'true', seconds: 0}}": ("score.seconds is 0", "above 0"),
    "command: 'true'\nlimits:\n  files: 0\nimage: x\ntrain: ''": (":3: limits.files is 0", ":5: train is ''"),
    "{command: 'true', fail_on: [exited]}": ("fail_on[0] is 'exited'", "a failure"),
    "{command: 'true', fail_on: [crash]}": ("fail_on[0] is 'crash'", "nonzero_exit"),
    "{command: 'true', answer: {}}": ("answer is {}", "file"),
    "{command: 'true', volatile: ['(']}": ("volatile[0] is '('", "a regular expression of Python"),
    "{command: 'true', volatile: [a, '[0-9]*']}": ("volatile[1] is", "does not match the empty text"),
}  # fmt: skip


@pytest.mark.parametrize("content", BAD)
def test_a_bad_file_is_refused_with_its_key_and_the_fix(tmp_path: Path, content: str) -> None:
    path = tmp_path / "harness.yml"
    path.write_text(content, encoding="utf-8")
    (tmp_path / "bad.bundle").write_bytes(b"no bundle")
    message, hint = BAD[content]
    with pytest.raises(ConfigError) as caught:
        check_agent("command", path)
    assert str(tmp_path) in caught.value.message
    assert message in caught.value.message
    assert hint in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        prepare(tmp_path / "none.yml")
    with pytest.raises(ConfigError, match="needs a description"):
        check_agent("command", None)


@pytest.mark.parametrize("path", ["/etc/harness.yml", "../harness.yml"])
def test_a_task_names_no_file_outside_the_samplers_folder(path: str) -> None:
    with pytest.raises(ConfigError, match="is not below the folder"):
        agent_cfg_path(path, None)
    assert agent_cfg_path(None, path) == Path(path)
    assert agent_cfg_path("agents/one.yml", path) == Path("agents/one.yml")


def test_the_keys_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_HARNESS_VENV", "/opt/venv")
    path = tmp_path / "harness.yml"
    path.write_text(
        "command: [echo, hello]\npath: ['${AGENTRL_HARNESS_VENV}/bin', '${NOT_SET_HERE}/bin', tools]\n"
        "environment: {FLAG: true, N: 3}\nlimits: {seconds: 5, disk_mb: 7}\nscore: exit_code\n"
        "answer: {file: a.txt}\n"
    )
    config = HarnessConfig.read(path)
    assert config.command == ("echo", "hello")
    assert config.path == ("/opt/venv/bin", str(tmp_path / "tools"))
    assert config.environment == {"FLAG": "true", "N": "3"}
    assert (config.limits.seconds, config.limits.disk_mb, config.limits.processes) == (5, 7, 256)
    assert (config.score, config.answer) == ("exit_code", HarnessFile(file="a.txt"))
    assert config.failing == frozenset(Ending) - {Ending.EXITED, Ending.NONZERO_EXIT, Ending.KILLED}
    path.write_text("command: 'true'\nscore: {command: 'true'}\n")
    assert HarnessConfig.read(path).failing == {Ending.NO_CALLS}
    path.write_text("command: 'true'\nfail_on: []\n")
    assert HarnessConfig.read(path).failing == frozenset()


def test_a_shell_line_may_begin_with_what_the_shell_knows() -> None:
    path = "/usr/bin:/bin"
    assert find_program("A=1 B=2 env", path, "x") in ("/usr/bin/env", "/bin/env")
    assert find_program("(cd /tmp && ls)", path, "x") is None
    assert find_program("while true; do ls; done", path, "x") is None


def test_the_folders_of_a_script_are_those_of_its_interpreter(tmp_path: Path) -> None:
    venv, base = tmp_path / "venv", tmp_path / "base"
    for folder in (venv / "bin", base / "bin"):
        folder.mkdir(parents=True)
    (base / "bin" / "python3").touch()
    (venv / "bin" / "python").symlink_to(base / "bin" / "python3")
    (venv / "pyvenv.cfg").write_text(f"home = {base}/bin\n")
    script = venv / "bin" / "tool"
    script.write_text(f"#!{venv}/bin/python\n")
    assert set(folders_of(str(script))) == {str(venv), str(base)}
    assert list(folders_of("/usr/bin/env")) == []


@pytest.mark.attack
@pytest.mark.parametrize(
    "text", ["9" * 311, "9" * 5000, "[" * 200_000, "1e999", "NaN", '"\\ud800"', '{"score": true}', ""]
)
def test_a_text_that_is_no_score_is_named(text: str) -> None:
    with pytest.raises(HarnessError, match=r"the file 'score' holds .*, not a score"):
        _read_score(text, "the file 'score'")


def test_a_score_may_have_details_that_bson_cannot_hold() -> None:
    result = _read_score('{"score": 1, "details": {"\\ud800": [1' + "0" * 311 + "]}}", "the file")
    assert (result.score, result.details) == (1.0, {"?": ["1" + "0" * 311]})
