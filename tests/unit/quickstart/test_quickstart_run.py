"""The quickstart resumes an unfinished run or starts a new one."""

import pytest
import yaml

from agentrl.errors import ConfigError
from agentrl.quickstart import run as quickstart


@pytest.fixture(autouse=True)
def checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def open_run(name=None, *, tiny=True, steps=None, seed=0):
    return quickstart.open_run(name, tiny=tiny, steps=steps, seed=seed)


def test_a_new_run_takes_the_base_name_and_the_default_steps():
    run = open_run()
    assert (run.name, run.steps, run.resumed) == ("quickstart-tiny", quickstart.TINY.steps, False)


def test_an_unfinished_run_resumes_to_its_own_target():
    open_run(steps=7)
    again = open_run()
    assert (again.name, again.steps, again.resumed) == ("quickstart-tiny", 7, True)


def test_a_finished_run_is_kept_and_the_next_gets_a_number():
    quickstart.close_run(open_run())
    assert open_run().name == "quickstart-tiny-2"


def test_another_seed_is_another_run():
    open_run(seed=0)
    assert open_run(seed=1).name == "quickstart-tiny-2"


def test_a_finished_run_cannot_be_named_again():
    quickstart.close_run(open_run("mine"))
    with pytest.raises(ConfigError, match="the run mine is finished"):
        open_run("mine")


def test_its_files_are_found_from_any_folder():
    run = open_run()
    assert yaml.safe_load(run.config.read_text())["train_file"] == f"assets/tasks/{run.tasks.name}"
    assert run.tasks.is_file()


def test_the_tool_servers_file_names_both_servers_and_the_port_of_the_http_one():
    servers = quickstart.tool_servers(open_run())
    content = yaml.safe_load(servers.file.read_text())["servers"]
    assert set(content) == {"calculator", "units"}
    assert content["units"]["url"].split(":")[2].split("/")[0] in servers.http_command
