"""Options, environment and memory: a misspelt name is answered with the nearest one; limits are the real ones."""

from pathlib import Path

import attrs
import pytest

from afl import config
from afl.config import EngineConfig, available_memory, plugins_enabled, unknown_variables
from afl.errors import ConfigError

GIB = 1 << 30


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown option 'max_seq'; did you mean 'max_seqs'"):
        EngineConfig.of({"max_seq": 4})


def test_all_unknown_options_are_named_at_once():
    with pytest.raises(ConfigError) as e:
        EngineConfig.of({"max_seq": 4, "chipp": "cpu", "depth": 1})
    assert "2 problems" in str(e.value) and "'chip'" in str(e.value) and "depth" not in str(e.value)


def test_every_option_is_accepted_by_its_name():
    default = EngineConfig()
    assert EngineConfig.of(attrs.asdict(default)) == default


@pytest.mark.parametrize("options, words", [
    ({"max_seqs": 0}, "max_seqs is 0"), ({"depth": 9}, "depth is 9"), ({"kv_blocks": -1}, "kv_blocks is -1"),
    ({"max_seqs": 8, "max_step_tokens": 4}, "below max_seqs"),
])
def test_an_option_that_does_not_hold_is_refused_with_its_range(options, words):
    with pytest.raises(ConfigError, match=words) as e:
        EngineConfig(**options)
    assert e.value.exit_status == 2


def test_a_misspelt_variable_names_the_nearest():
    rows = unknown_variables({"AFL_PLUGIN": "off", "HOME": "/", "AFL_LOG": "x", "MY_AFL_X": "1"})
    assert rows == ["environment variable AFL_PLUGIN is not known; did you mean AFL_PLUGINS?"]


def test_every_known_variable_is_recognised():
    assert unknown_variables(dict.fromkeys(config.ENVIRONMENT, "x")) == []
    assert unknown_variables({}) == []


@pytest.mark.parametrize("value, on", [("off", False), ("OFF", False), ("0", False), ("on", True), ("", True)])
def test_plugins_are_on_unless_switched_off(value, on, monkeypatch):
    assert plugins_enabled({"AFL_PLUGINS": value}) is on
    monkeypatch.setenv("AFL_PLUGINS", "off")
    assert plugins_enabled({}), "an empty environment is an environment, not a reason to look at the real one"


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path):
    """Write files of a made-up host; the root of it."""

    def build(files: dict[str, str]) -> Path:
        for name, text in ({"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n"} | files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return build


def test_memory_is_what_the_kernel_calls_available(host):
    assert available_memory(host({})) == 8 * GIB


def test_a_group_without_a_limit_changes_nothing(host):
    assert available_memory(host(group2("", "max", 5))) == 8 * GIB


def group2(at: str, limit: int | str, use: int, droppable: int | None = None) -> dict[str, str]:
    files = {f"sys/fs/cgroup/{at}memory.max": f"{limit}\n", f"sys/fs/cgroup/{at}memory.current": f"{use}\n"}
    if droppable is not None:
        files[f"sys/fs/cgroup/{at}memory.stat"] = f"anon 5\ninactive_file {droppable}\nactive_file 1\n"
    return files


def test_the_limit_of_a_version_2_group_caps_it(host):
    assert available_memory(host(group2("", 3 * GIB, GIB, 0))) == 2 * GIB


def test_page_cache_that_can_be_dropped_is_free(host):
    assert available_memory(host(group2("", 3 * GIB, 2 * GIB, GIB))) == 2 * GIB


def test_a_group_whose_statistics_cannot_be_read_still_has_its_limit(host):
    assert available_memory(host(group2("", 3 * GIB, GIB))) == 2 * GIB


def test_the_limit_of_a_group_above_counts(host):
    groups = group2("pod/", 4 * GIB, GIB, 0) | group2("pod/box/", "max", GIB, 0)
    assert available_memory(host({"proc/self/cgroup": "0::/pod/box\n"} | groups)) == 3 * GIB


def test_the_limit_of_a_version_1_group_caps_it(host):
    at = "sys/fs/cgroup/memory/box/"
    assert available_memory(host({
        "proc/self/cgroup": "3:cpu,cpuacct:/other\n2:memory:/box\n",
        at + "memory.limit_in_bytes": f"{2 * GIB}\n", at + "memory.usage_in_bytes": f"{GIB}\n", at + "memory.stat": "",
    })) == GIB


def test_a_version_1_group_without_a_limit_changes_nothing(host):
    at = "sys/fs/cgroup/memory/"
    assert available_memory(host({
        at + "memory.limit_in_bytes": "9223372036854771712\n", at + "memory.usage_in_bytes": "1\n",
    })) == 8 * GIB


def test_a_group_over_its_limit_has_nothing_left(host):
    assert available_memory(host(group2("", GIB, 2 * GIB, 0))) == 0


def test_this_machine_has_memory_and_cores():
    assert 0 < available_memory() < 1 << 50
    assert config.usable_cores() >= 1
