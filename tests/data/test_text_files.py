import os

import pytest

from jaxseek.data.text_files import read_documents
from jaxseek.errors import UserError


def as_pairs(corpus):
    return [tuple(document) for document in corpus.documents]


@pytest.fixture
def tree(tmp_path):
    files = {
        "b.txt": b"text\r\nline\n",
        "a.md": b"# title\n",
        "sub/c.py": b"x = 1\n",
        "sub/d.jsonl": b'{"text": "one"}\n\n{"text": "two", "id": 3}',
        "sub/empty.txt": b"",
        "sub/image.png": b"\x89PNG",
        ".git/hidden.txt": b"hidden\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_folder_is_read_in_order_of_names(tree):
    corpus = read_documents(tree)
    assert as_pairs(corpus) == [
        ("a.md", "# title\n"),
        ("b.txt", "text\nline\n"),
        ("sub/c.py", "x = 1\n"),
        ("sub/d.jsonl:1", "one"),
        ("sub/d.jsonl:3", "two"),
    ]
    assert corpus.skipped == ("sub/empty.txt: empty",)


def test_names_do_not_depend_on_where_the_folder_lies(tree, tmp_path_factory, monkeypatch):
    moved = tmp_path_factory.mktemp("moved") / "tree"
    names = [name for name, _ in as_pairs(read_documents(tree))]
    os.rename(tree, moved)
    assert [name for name, _ in as_pairs(read_documents(moved))] == names
    monkeypatch.chdir(moved)
    assert [name for name, _ in as_pairs(read_documents("**/*"))] == names
    assert [name for name, _ in as_pairs(read_documents("./s*/*.jsonl"))] == [
        "sub/d.jsonl:1",
        "sub/d.jsonl:3",
    ]


def test_glob_and_single_file(tree):
    assert as_pairs(read_documents(f"{tree}/*.txt")) == [("b.txt", "text\nline\n")]
    assert as_pairs(read_documents(tree / "sub" / "c.py")) == [("c.py", "x = 1\n")]


@pytest.mark.parametrize(
    ("suffix", "content"),
    [(".txt", b"a\nb\n"), (".py", b"x = 1\n"), (".jsonl", b'{"text": "a"}\n{"text": "b"}\n')],
)
def test_byte_order_mark_changes_nothing(tmp_path, suffix, content):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    plain = read_documents(path)
    path.write_bytes(b"\xef\xbb\xbf" + content)
    assert read_documents(path) == plain


def test_line_separators_inside_json_strings_do_not_cut_a_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\u2028b\u0085c"}\r\n{"text": "d"}', encoding="utf-8", newline="")
    assert as_pairs(read_documents(path)) == [
        ("a.jsonl:1", "a\u2028b\u0085c"),
        ("a.jsonl:2", "d"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nbad \xff\n", r"a\.txt:2: not valid UTF-8 \(byte 0xff"),
        ("a.txt", "text".encode("utf-16"), r"a\.txt:1: not valid UTF-8"),
        ("a.py", b"x = 1\ny = 2\nz = '\xe9'\n", r"a\.py:3: not valid UTF-8 \(byte 0xe9"),
        ("a.py", b"# coding: klingon\n", r"a\.py:1: unknown encoding"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2: not valid UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b', r"a\.jsonl:3: not one whole JSON object"),
        ("a.jsonl", b'{"text": "a"} {"text": "b"}', r"a\.jsonl:1: not one whole JSON object"),
        ("a.jsonl", b'{"body": "a", "id": 1}', r"a\.jsonl:1: no field 'text'.*'body', 'id'"),
        ("a.jsonl", b"{}", r"a\.jsonl:1: no field 'text'; fields found: none"),
        ("a.jsonl", b'{"text": null}', r"a\.jsonl:1: field 'text' is null; text is needed"),
        ("a.jsonl", b'{"text": 1.5}', r"a\.jsonl:1: field 'text' is number"),
        ("a.jsonl", b'{"text": true}', r"a\.jsonl:1: field 'text' is boolean"),
        ("a.jsonl", b'{"text": ["a"]}', r"a\.jsonl:1: field 'text' is list"),
        ("a.jsonl", b'["a"]', r"a\.jsonl:1: list where an object with field 'text'"),
        ("a.jsonl", b'{"text": "a", "text": "b"}', r"a\.jsonl:1: field 'text' stands twice"),
        ("a.jsonl", rb'{"text": "a\ud800"}', r"a\.jsonl:1: half a surrogate pair at character 2"),
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.jsonl", b"\n\n", r"a\.jsonl is empty"),
        ("a.txt.gz", b"\x1f\x8b", r"cannot read a \.gz file.*Decompress it first"),
        ("a.parquet", b"PAR1", r"cannot read a \.parquet file"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_documents(tmp_path / name)


def test_empty_records_are_skipped_and_listed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "b"}\n')
    corpus = read_documents(tmp_path)
    assert as_pairs(corpus) == [("a.jsonl:2", "b")]
    assert corpus.skipped == ("a.jsonl:1: empty",)


def test_sources_without_usable_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_documents(tmp_path / "missing")
    with pytest.raises(UserError, match=r"matches no file"):
        read_documents(f"{tmp_path}/*.txt")
    with pytest.raises(UserError, match=r"has no \.jsonl, \.md, \.py, \.txt file; found: nothing"):
        read_documents(tmp_path)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UserError, match=r"found: 1 x \.csv"):
        read_documents(tmp_path)
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(UserError, match=r"all 2 files of .* are empty"):
        read_documents(tmp_path)
