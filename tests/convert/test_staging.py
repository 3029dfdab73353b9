import pytest

from convert.staging import new_folder
from jaxseek.errors import UserError


def test_a_folder_appears_when_its_block_ends(tmp_path):
    out = tmp_path / "deep" / "out"
    with new_folder(out, needed_bytes=1) as partial:
        assert partial == tmp_path / "deep" / "out.partial"
        (partial / "file").write_text("content")
        assert not out.exists()
    assert (out / "file").read_text() == "content"
    assert not partial.exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_where_the_block_fails(error, tmp_path):
    with pytest.raises(error), new_folder(tmp_path / "out", needed_bytes=1) as partial:
        (partial / "file").write_text("half")
        raise error
    assert not list(tmp_path.iterdir())


def test_a_system_error_becomes_one_that_names_the_folder(tmp_path):
    out = tmp_path / "out"
    message = f"{out} could not be written: .*Input/output error"
    with pytest.raises(UserError, match=message), new_folder(out, needed_bytes=1):
        raise OSError(5, "Input/output error", "disk")
    assert not list(tmp_path.iterdir())


def test_a_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    out, message = tmp_path / "file" / "out", r"out\.partial cannot be made"
    with pytest.raises(UserError, match=message), new_folder(out, needed_bytes=1):
        pass
