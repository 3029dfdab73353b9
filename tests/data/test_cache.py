import os
from pathlib import Path

import pytest

from jaxseek.data.cache import atomic_write, digest, documents_digest
from jaxseek.data.documents import Document
from jaxseek.errors import UserError
from jaxseek.paths import cache_dir


def test_cache_folder_is_the_configured_one_or_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSEEK_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("JAXSEEK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "jaxseek"


def test_digest_tells_where_one_part_ends():
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    assert digest(["a"]) != digest(["a", ""])
    assert documents_digest([Document("a", "b")]) == digest(["a", "b"])


def test_odd_file_names_have_a_digest():
    assert digest([os.fsdecode(b"\xff.py")]) != digest([os.fsdecode(b"\xfe.py")])


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "sub" / "file"
    with atomic_write(path) as temporary:
        temporary.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_folder_that_cannot_be_made_is_the_users_error():
    with (
        pytest.raises(UserError, match=r"cannot write the data cache .*Set JAXSEEK_CACHE"),
        atomic_write(Path(__file__) / "sub" / "file"),
    ):
        pass
