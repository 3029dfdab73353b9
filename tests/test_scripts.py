"""scripts/lib/venv.sh installs once, and again only when what it depends on has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VENV_SH = Path(__file__).parents[1] / "scripts" / "lib" / "venv.sh"
# Stands in for the environment's Python: pip only takes notes, and fails when told to.
PYTHON_WITHOUT_PIP = """#!/bin/sh
if [ "$2" = pip ]; then
    echo "$@" >>"$LOG"
    test ! -e "$LOG.pip-fails"
else
    exec {python} "$@"
fi
"""


class Checkout:
    """A copy of the scripts with an environment whose pip only takes notes."""

    def __init__(self, root: Path):
        self.root = root
        self.log = root / "log"
        self.project = root / "pyproject.toml"
        self.project.write_text("[project]\n")
        (root / "scripts" / "lib").mkdir(parents=True)
        shutil.copy(VENV_SH, root / "scripts" / "lib")
        python = root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON_WITHOUT_PIP.format(python=sys.executable))
        python.chmod(0o755)

    def install_once(self, extra: str) -> subprocess.CompletedProcess:
        unset = ("PYTHON", "VENV")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        script = 'set -euo pipefail; . scripts/lib/venv.sh; install_once "$1"'
        return subprocess.run(
            ["bash", "-c", script, "-", extra],
            cwd=self.root,
            env={**environment, "LOG": str(self.log)},
            capture_output=True,
            text=True,
        )

    def installed(self) -> list[str]:
        """What pip was asked to install so far, relative to the checkout."""
        requests = self.log.read_text().splitlines() if self.log.exists() else []
        return [request.split()[-1].removeprefix(str(self.root)) for request in requests]


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def test_a_second_call_installs_nothing(checkout):
    for _ in range(2):
        assert checkout.install_once("test").returncode == 0
    assert checkout.installed() == ["[test]"]


def test_each_extra_is_installed_once(checkout):
    for extra in ("", "cuda12", "", "cuda12"):
        assert checkout.install_once(extra).returncode == 0
    assert checkout.installed() == ["", "[cuda12]"]


def test_the_cuda_lane_has_its_environment_in_the_checkout_wherever_it_is_called_from(checkout):
    shutil.copy(VENV_SH.parents[1] / "test-cuda", checkout.root / "scripts")
    shutil.move(checkout.root / ".venv", checkout.root / ".venv-cuda")
    environment = {name: value for name, value in os.environ.items() if name != "VENV"}
    subprocess.run(
        [checkout.root / "scripts" / "test-cuda", "--version"],
        cwd=checkout.root / "scripts",
        env={**environment, "LOG": str(checkout.log)},
        check=True,
        capture_output=True,
    )
    assert checkout.installed() == ["[cuda12-test]"]
    assert not (checkout.root / "scripts" / ".venv-cuda").exists()


def test_a_changed_pyproject_is_installed_again(checkout):
    checkout.install_once("test")
    checkout.project.write_text("[project]\ndependencies = ['jax']\n")
    checkout.install_once("test")
    assert checkout.installed() == ["[test]", "[test]"]


def test_a_failed_installation_says_so_and_is_tried_again(checkout):
    (failure := checkout.root / "log.pip-fails").touch()
    failed = checkout.install_once("test")
    assert failed.returncode == 2
    assert "pip could not install jaxseek[test]" in failed.stderr
    failure.unlink()
    assert checkout.install_once("test").returncode == 0
    assert checkout.installed() == ["[test]", "[test]"]
