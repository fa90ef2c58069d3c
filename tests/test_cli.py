"""The `cptools` command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cptools
from cptools import cli
from cptools.doctor import examine


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"cptools {cptools.__version__}\n"


def test_doctor_json_agrees_with_this_machine(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["torch"] == {"ok": True, "detail": torch.__version__}
    assert report["runs"]["CPU reference path"]["ok"]
    assert report["runs"]["GPU"]["ok"] == torch.cuda.is_available()
    assert report["machine"]["pinned memory"]["ok"] == torch.cuda.is_available()


def test_doctor_text_says_what_is_missing(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for finding in examine().runs:
        answer = "yes" if finding.ok else "no"
        assert re.search(rf"^ *{answer} +{re.escape(finding.name)} +{re.escape(finding.detail)}$", text, re.MULTILINE)


def test_doctor_survives_a_package_whose_import_kills_the_process(tmp_path, monkeypatch):
    package = tmp_path / "nixl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_api.py").write_text("import os; os._exit(9)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    nixl = next(f for f in examine().machine if f.name == "nixl")
    assert not nixl.ok
    assert "exit status 9" in nixl.detail


def test_doctor_does_not_promise_a_model_that_is_not_installed(tmp_path):
    """As after an install of the wheel, which holds cptools alone."""
    root = Path(cptools.__file__).parents[1]
    (tmp_path / "cptools").symlink_to(root / "cptools")
    code = f"""
import sys
sys.path = [folder for folder in sys.path if folder != {str(root)!r}]
import cptools.cli
cptools.cli.main(["doctor", "--json"])
"""
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    model = json.loads(child.stdout)["runs"]["models.glm53"]
    assert not model["ok"]
    assert "not in the wheel" in model["detail"]


def test_doctor_finds_the_model_of_a_checkout():
    assert next(f for f in examine().runs if f.name == "models.glm53").ok


def test_unknown_command_is_refused():
    child = subprocess.run([sys.executable, "-m", "cptools.cli", "nope"], capture_output=True, text=True, timeout=60)
    assert child.returncode == 2
    assert "nope" in child.stderr
