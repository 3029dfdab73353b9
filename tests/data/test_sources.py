import json
import sysconfig
from pathlib import Path

import pytest

from jaxseek.data.sources import load_corpus, stdlib_documents
from jaxseek.errors import UserError


def write(root: Path, name: str, content: bytes | str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def test_standard_library_package_is_read_as_it_is():
    root = Path(json.__file__).parent
    documents = {name: text for name, text in stdlib_documents(root=root).documents}
    assert documents["decoder.py"] == (root / "decoder.py").read_text(encoding="utf-8")
    assert list(documents) == sorted(documents)
    assert set(documents) == {path.name for path in root.glob("*.py")}


def test_default_is_the_library_of_the_running_python(monkeypatch):
    root = str(Path(json.__file__).parent)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": root})
    assert load_corpus("stdlib") == stdlib_documents(root=Path(root))


def test_tests_and_foreign_packages_are_left_out(tmp_path):
    kept = ["a.py", "pkg/b.py", "latest/c.py"]
    dropped = [
        "test/d.py",
        "pkg/tests/e.py",
        "idlelib/idle_test/f.py",
        "site-packages/g.py",
        "pkg/__pycache__/h.py",
        "lib2to3/i.py",
        "pydoc_data/topics.py",
        "_sysconfigdata__linux_.py",
        "j.txt",
    ]
    for name in kept + dropped:
        write(tmp_path, name, "x = 1\n")
    write(tmp_path, "pkg/__init__.py", "")
    names = [document.name for document in stdlib_documents(root=tmp_path).documents]
    assert names == sorted(kept)


def test_encodings_follow_pep_263_and_undecodable_files_are_listed(tmp_path):
    write(tmp_path, "latin.py", "# coding: latin-1\ns = '\u00e9'\r\n".encode("latin-1"))
    write(tmp_path, "bom.py", b"\xef\xbb\xbfx = 1\n")
    write(tmp_path, "bad.py", b"x = 1\ny = 2\ns = '\xe9'\n")
    write(tmp_path, "unknown.py", b"# coding: klingon\n")
    corpus = stdlib_documents(root=tmp_path)
    assert dict(corpus.documents) == {
        "latin.py": "# coding: latin-1\ns = '\u00e9'\n",
        "bom.py": "x = 1\n",
    }
    assert [line.split(":")[0] for line in corpus.skipped] == ["bad.py", "unknown.py"]


def test_library_without_sources_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no source files"):
        stdlib_documents(root=tmp_path)


def test_other_sources_are_files(tmp_path):
    write(tmp_path, "a.jsonl", '{"body": "x"}\n')
    corpus = load_corpus(str(tmp_path), text_field="body")
    assert [tuple(document) for document in corpus.documents] == [("a.jsonl:1", "x")]
