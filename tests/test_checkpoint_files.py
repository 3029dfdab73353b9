import pytest

from jaxseek.checkpoint_files import (
    FileRecord,
    Leaf,
    Manifest,
    changed_files,
    delete_old,
    incompleteness,
    read_manifest,
    record_files,
    write_manifest,
)


def write_step(directory, step):
    folder = directory / str(step)
    (folder / "state" / "d").mkdir(parents=True)
    (folder / "state" / "d" / "data").write_bytes(b"abc")
    leaves = {"b": Leaf(shape=(2, 3), dtype="bfloat16"), "a": Leaf(shape=(), dtype="int32")}
    manifest = Manifest(
        step=step, leaves=leaves, files=record_files(folder), metadata={"x": [1, None]}
    )
    write_manifest(folder, manifest)
    return manifest


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    manifest = write_step(tmp_path, 7)
    assert read_manifest(tmp_path / "7") == manifest
    assert list(manifest.leaves) == ["b", "a"]
    assert incompleteness(tmp_path / "7") is None
    # The digest of "abc" in FIPS 180-2, appendix B.1.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest.files == {"state/d/data": FileRecord(size=3, sha256=digest)}
    assert changed_files(tmp_path / "7") == []


@pytest.mark.parametrize(
    ("keep", "left"), [(1, ["6"]), (2, ["4", "6"]), (3, ["2", "4", "6"]), (9, ["2", "4", "6"])]
)
def test_the_newest_are_kept(tmp_path, keep, left):
    for step in (2, 4, 6):
        write_step(tmp_path, step)
    delete_old(tmp_path, newest=6, keep=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_damaged_step_counts_as_none_of_the_kept_and_is_not_deleted(tmp_path):
    for step in (2, 4, 6):
        write_step(tmp_path, step)
    (tmp_path / "4" / "state" / "d" / "data").write_bytes(b"ab")
    delete_old(tmp_path, newest=6, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "6"]


def test_nothing_is_deleted_when_the_newest_is_not_complete(tmp_path):
    for step in (2, 4):
        write_step(tmp_path, step)
    (tmp_path / "4" / "state" / "d" / "data").unlink()
    with pytest.raises(AssertionError, match="data is missing"):
        delete_old(tmp_path, newest=4, keep=1)
    assert incompleteness(tmp_path / "2") is None
