import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import xxhash

from jaxseek.checkpoint_files import (
    HASH_BLOCK,
    Checksum,
    FileRecord,
    Leaf,
    Manifest,
    changed_files,
    delete_old,
    free_bytes,
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
    # What `xxhsum -H2` prints for a file of "abc".
    digest = "xxh3_128:06b05ab6733a618578af5f94892f3950"
    assert manifest.files == {"state/d/data": FileRecord(size=3, checksum=digest)}
    assert changed_files(tmp_path / "7") == []


def write_version_1(folder):
    # The digest of "abc" in FIPS 180-2, appendix B.1.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    path = folder / "jaxseek.json"
    content = json.loads(path.read_text())
    content["format_version"] = 1
    content["files"] = {"state/d/data": {"size": 3, "sha256": digest}}
    path.write_text(json.dumps(content))
    return digest


def test_a_manifest_of_version_1_is_read_and_verified_by_its_sha256(tmp_path):
    manifest = write_step(tmp_path, 7)
    digest = write_version_1(tmp_path / "7")
    read = read_manifest(tmp_path / "7")
    assert read.files == {"state/d/data": FileRecord(size=3, checksum=f"sha256:{digest}")}
    assert (read.leaves, read.metadata) == (manifest.leaves, manifest.metadata)
    assert incompleteness(tmp_path / "7") is None
    assert changed_files(tmp_path / "7") == []
    (tmp_path / "7" / "state" / "d" / "data").write_bytes(b"abd")
    assert changed_files(tmp_path / "7") == ["state/d/data"]


def test_a_checksum_of_another_kind_makes_a_manifest_unreadable(tmp_path):
    write_step(tmp_path, 7)
    path = tmp_path / "7" / "jaxseek.json"
    path.write_text(path.read_text().replace("xxh3_128:", "md5:"))
    assert "unknown checksum 'md5:" in str(incompleteness(tmp_path / "7"))


def test_a_checksum_does_not_depend_on_the_pieces(tmp_path):
    content = np.random.default_rng(0).bytes(2 * HASH_BLOCK + 3)
    (tmp_path / "file").write_bytes(content)
    whole = f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"
    assert record_files(tmp_path) == {"file": FileRecord(size=len(content), checksum=whole)}
    checksum = Checksum()
    for piece in (content[:1], bytearray(content[1:70]), memoryview(content)[70:]):
        checksum.update(piece)
    assert checksum.text() == whole


def test_a_checksum_of_an_array_is_that_of_its_bytes():
    array = np.arange(12, dtype=ml_dtypes.bfloat16).reshape(3, 4)
    of_array, of_bytes = Checksum(), Checksum()
    of_array.update(array)
    of_bytes.update(array.tobytes())
    assert of_array.text() == of_bytes.text()
    with pytest.raises(AssertionError):
        of_array.update(array.T)


def test_known_records_are_taken_without_reading_the_files(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).write_bytes(b"abc")
    known = {"b": FileRecord(size=9, checksum="xxh3_128:0")}
    records = record_files(tmp_path, known=known)
    assert list(records) == ["a", "b", "c"]
    assert records["b"] == known["b"]
    assert records["a"] == records["c"] != known["b"]
    with pytest.raises(AssertionError, match=r"never written: \['d'\]"):
        record_files(tmp_path, known={"d": known["b"]})


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


def test_the_room_of_a_folder_is_that_of_the_disk_it_will_be_made_on(tmp_path, monkeypatch):
    asked = []
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: asked.append(path) or usage)
    assert free_bytes(tmp_path / "not" / "yet") == usage.free
    assert asked == [tmp_path]


def test_nothing_is_deleted_when_the_newest_is_not_complete(tmp_path):
    for step in (2, 4):
        write_step(tmp_path, step)
    (tmp_path / "4" / "state" / "d" / "data").unlink()
    with pytest.raises(AssertionError, match="data is missing"):
        delete_old(tmp_path, newest=4, keep=1)
    assert incompleteness(tmp_path / "2") is None
