"""`afl chips`: figures with their sources, and the page that is generated from chips and kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NPUS = ("310p", "a2", "a3", "a5")


def test_the_list_has_every_chip(afl):
    out = afl("chips").stdout
    assert [line.split()[0] for line in out.splitlines()] == [*NPUS, "cpu"]
    assert "bfloat16, float16" in out and "Ascend 310P" in out


@pytest.mark.parametrize("name", NPUS)
def test_a_chip_shows_a_row_for_each_bin_and_where_each_figure_comes_from(afl, name):
    found = json.loads(afl("chips", name, "--json").stdout)
    lines = afl("chips", name).stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("bin "))
    bins = [r["bin"] for r in found["rooflines"]]
    assert [line for line in lines[head + 1 :][: len(bins)] if line.startswith(tuple(bins))] == lines[head + 1 :][
        : len(bins)]
    given = {k for r in found["rooflines"] for k, v in r.items() if k not in ("bin", "sources") and v}
    for figure in given:
        assert any(line.startswith(f"source of {figure} ") for line in lines), f"{figure} has no source"
    told = [line.split(maxsplit=3)[3] for line in lines if line.startswith("source of ")]
    assert all(any(kind in t for kind in ("public", "code", "assumed", "none")) for t in told)


def test_figures_have_their_units(afl):
    out = afl("chips", "a2").stdout
    row = next(line.split() for line in out.splitlines() if line.startswith("B4 "))
    assert row == ["B4", "280", "280", "560", "32", "1600", "392", "64"]
    assert "Tfloat16/s" in out and "source of flops" in out and "public for B3, code for B1" in out


def test_the_host_has_no_figures(afl):
    assert "source of" not in afl("chips", "cpu").stdout


def test_options_that_do_not_fit_are_refused(afl):
    assert afl("chips", "a6").exit_code == 2 and "did you mean" in afl("chips", "a6").stderr
    refused = afl("chips", "a2", "--markdown")
    assert refused.exit_code == 2 and "leave NAME and --json out" in refused.stderr


def test_the_page_on_chips_is_what_the_command_writes():
    code = "import sys; from afl_cli.commands import app; app(['chips', '--markdown'])"
    env = os.environ | {"AFL_PLUGINS": "off"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "docs" / "chips.md").read_text(), "run `afl chips --markdown > docs/chips.md`"
    assert "| paged_attention | atb_nz | fia, atb | fia, atb | fia | " in done.stdout
