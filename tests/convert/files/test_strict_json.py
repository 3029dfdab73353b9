"""JSON whose keys stand once."""

import pytest

from convert.files import strict_json


def test_a_byte_order_mark_changes_nothing():
    assert strict_json.loads(b'\xef\xbb\xbf{"a": [1, "\xc3\xa9"]}') == {"a": [1, "é"]}


@pytest.mark.parametrize("raw", [b'{"a": 1, "b": 2, "b": 2}', b'[{"c": {"b": 1, "b": 2}}]'])
def test_a_key_that_stands_twice_is_refused_at_any_depth(raw: bytes):
    with pytest.raises(ValueError, match="the key 'b' stands there 2 times"):
        strict_json.loads(raw)


def test_a_key_that_stands_twice_among_very_many_is_found_quickly():
    entries = ",".join(f'"{i}": 0' for i in range(200_000))
    with pytest.raises(ValueError, match="the key '199999' stands there 2 times"):
        strict_json.loads(f'{{{entries}, "199999": 1}}'.encode())


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "not valid JSON, line 1, column 1"),
        (b'{\n"a": }', "not valid JSON, line 2, column 6"),
        (b"\xff\xfe{\x00}\x00", "byte 0 is not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_is_refused_with_the_place(raw: bytes, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        strict_json.loads(raw)
