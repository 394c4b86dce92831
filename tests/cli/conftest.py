"""Running `afl` inside this process, and the tiny checkpoints it runs."""

import json

import pytest
import tiny
from afl_cli.commands import app
from typer.testing import CliRunner


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return str(tiny.folder(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    return str(tiny.folder(tmp_path_factory.mktemp("qwen3"), "qwen3"))


@pytest.fixture
def afl():
    """afl(*arguments, input=...) -> the result, with stdout, stderr and exit_code."""

    def call(*arguments, input=None):
        result = CliRunner().invoke(app, [str(a) for a in arguments], input=input, prog_name="afl")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def ask(afl):
    """ask(model, *arguments) -> the JSON lines of a run that must succeed."""

    def call(model, *arguments, input=None):
        result = afl("run", "--model", model, "--json", *arguments, input=input)
        assert result.exit_code == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return call
