"""Strict YAML: values and lines, and a clear refusal of everything doubtful."""

import pytest

from jaxseek.errors import UserError
from jaxseek.schema import Setting
from jaxseek.yaml_file import dump_yaml, read_yaml


def read(tmp_path, content):
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_yaml(path)


def test_sections_become_dotted_keys_that_know_their_line(tmp_path):
    settings = read(tmp_path, "steps: 3\noptim:\n  eps: 1e-8\nmodel.head_dim: null\n")
    assert {key: s.value for key, s in settings.items()} == {
        "steps": 3,
        "optim.eps": 1e-8,
        "model.head_dim": None,
    }
    assert settings["optim.eps"].origin == f"{tmp_path / 'run.yaml'}, line 3: optim.eps"


def test_byte_order_mark_changes_nothing(tmp_path):
    assert read(tmp_path, b"\xef\xbb\xbfsteps: 3\n")["steps"].value == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "run.yaml is empty"),
        ("# nothing but a comment\n", "run.yaml is empty"),
        ("- a\n- b\n", "run.yaml holds a list; keys and values such as"),
        ("hello\n", "run.yaml holds text; keys and values such as"),
        ("steps: 3\nsteps: 4\n", "run.yaml, line 2: steps is given a second time"),
        ("optim: {eps: 1}\noptim.eps: 2\n", "run.yaml, line 2: optim.eps is given a second time"),
        ("optim:\n\teps: 1\n", "run.yaml, line 2: .*indented with spaces"),
        ("a: 1\nsteps: [1\n", "run.yaml, line 3: expected ',' or ']'"),
        ("a: *other\n", "run.yaml, line 1: found undefined alias"),
        ("a: !!python/name:os.system\n", "run.yaml, line 1: could not determine a constructor"),
        ("a\x00b: 1\n", "run.yaml is not YAML"),
        (b"\xff\xfea: 1\n", "run.yaml is not UTF-8 text"),
    ],
)
def test_doubtful_files_are_refused_with_file_and_line(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, content)


def test_missing_file_and_folder_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: there is no such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)


@pytest.mark.parametrize(
    "value", [3, 3.0, 1e-8, 1e22, 0.1, True, None, "", "3", "3e-4", "null", "a: b", "é｜", "1e5"]
)
def test_dumped_values_read_back_equal_in_value_and_type(tmp_path, value):
    text = dump_yaml({"a.b": Setting(value=value, origin=""), "c": Setting(value=0, origin="")})
    back = read(tmp_path, text)["a.b"].value
    assert back == value and type(back) is type(value)
