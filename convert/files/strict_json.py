"""JSON in which every key stands once: whoever reads a file that says two things may get either."""

import json
from collections import Counter
from typing import Any


def loads(raw: bytes) -> Any:
    """The value of a JSON text in UTF-8, with or without a byte order mark.

    Raises:
        ValueError: it is none, or an object gives a key twice. The message fits behind the name of
            the file and a colon, and ends without a full stop.
    """
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not valid JSON, line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise ValueError("not valid JSON: it is nested too deeply") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(key, times)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} stands there {times} times")
    return values
