"""Mistakes of the user end with exit code 2 and one message; everything else is ours and passes."""

import os
import subprocess
import sys

import pytest

from jaxseek.cli import run_main
from jaxseek.errors import UserError


def raising(error):
    def main():
        raise error

    return main


def test_success_is_exit_code_0_and_silent(capsys):
    assert run_main(lambda: None, program="jaxseek.x") == 0
    assert capsys.readouterr() == ("", "")


def test_mistake_is_exit_code_2_and_one_line_on_stderr(capsys):
    assert run_main(raising(UserError("batch 10 is odd.")), program="jaxseek.x") == 2
    assert capsys.readouterr() == ("", "jaxseek.x: error: batch 10 is odd.\n")


def test_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_main(raising(ZeroDivisionError()), program="jaxseek.x")


def test_a_reader_that_has_enough_ends_the_program_without_a_word():
    code = (
        "import sys\n"
        "from jaxseek.cli import run_main\n"
        "sys.exit(run_main(lambda: print('figures'), program='jaxseek.x'))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
