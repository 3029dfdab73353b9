import threading
import time
from pathlib import Path

import pytest

from convert.staging import new_folder, unfinished
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


def test_what_other_threads_still_write_is_deleted_too(tmp_path):
    def write_on(folder):
        for _ in range(10):
            folder.mkdir(parents=True, exist_ok=True)
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out", needed_bytes=1) as partial:
        thread = threading.Thread(target=write_on, args=(partial / "deep",))
        thread.start()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    thread.join()


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


def test_a_link_to_an_empty_folder_is_followed(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    with new_folder(tmp_path / "link", needed_bytes=1) as partial:
        (partial / "file").touch()
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["file"]


def test_dots_in_a_path_are_resolved(tmp_path):
    with new_folder(tmp_path / "none" / ".." / "out", needed_bytes=1) as partial:
        assert partial == tmp_path / "out.partial"


def test_the_root_of_a_disk_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="/ exists already"), new_folder(Path("/"), needed_bytes=1):
        pass
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    message = "is where a disk is mounted, .* give one in it"
    with (
        pytest.raises(UserError, match=message),
        new_folder(tmp_path / "disk", needed_bytes=1),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]


def test_what_an_interrupted_conversion_left_is_known_by_its_name(tmp_path):
    for path in (tmp_path / "out.partial", tmp_path / "out.partial" / "checkpoints" / "0"):
        assert str(unfinished(path)).startswith(f"{tmp_path / 'out.partial'} is not finished")
    assert unfinished(tmp_path / "out") is None
