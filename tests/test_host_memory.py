"""A program that asks for huge pages starts anew once, with its arguments."""

import os
import subprocess
import sys

from jaxseek.host_memory import _glibc_version

PROGRAM = """
import os, sys
from jaxseek.host_memory import use_huge_pages
print("started", flush=True)
use_huge_pages()
print(sys.argv[1:], os.environ.get("GLIBC_TUNABLES"))
"""


def run(**variables: str) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | variables
    command = [sys.executable, "-c", PROGRAM, "--steps", "6"]
    return subprocess.check_output(command, text=True, env=environment).splitlines()


def test_it_starts_anew_once_where_glibc_offers_huge_pages():
    offered = _glibc_version() >= (2, 35)
    expected = "glibc.malloc.hugetlb=1" if offered else None
    assert run() == ["started"] * (2 if offered else 1) + [f"['--steps', '6'] {expected}"]


def test_a_setting_of_the_user_stays():
    assert run(GLIBC_TUNABLES="x") == ["started", "['--steps', '6'] x"]
