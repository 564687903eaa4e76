"""Checks of URLs: only data sources may be URLs; other paths are local or hub ids."""

import re
from typing import Annotated

from pydantic import AfterValidator

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_HUB = re.compile(r"(?:www\.)?huggingface\.co/(?:datasets/)?(?P<id>[^/]+/[^/?#]+)|datasets/(?P<data>[^/]+/[^/@]+)")
"""URL of a hub page, or of fsspec's `hf://datasets/..`, without the scheme."""


def is_url(text: str) -> bool:
    """Whether a text begins with a scheme (`s3://`, `https://`)."""
    return _URL.match(text) is not None


def scheme_of(text: str) -> str:
    """Scheme of a URL, in lower case; empty for other texts."""
    found = _URL.match(text)
    return found["scheme"].lower() if found else ""


def url_problem(text: str) -> tuple[str, str] | None:
    """Message and proposal for a URL where none is accepted; None for other texts."""
    if (found := data_url_problem(text)) or not is_url(text):
        return found
    if hub := _hub_id(text):
        return f"{text} is a URL, and a hub id or a path is expected", hub
    message = f"{scheme_of(text)}:// is remote storage, which is neither read nor written"
    return message, "a local copy, a mounted folder or a hub id"


def data_url_problem(text: str) -> tuple[str, str] | None:
    """Message and proposal for an unsuitable URL of rows: a local file, or a page of the hub; None if it is fine."""
    found, scheme = _URL.match(text), scheme_of(text)
    if found is None:
        return None
    if scheme == "file":
        return f"{text} is a URL, and a path is expected", f"/{found['rest'].lstrip('/')}"
    if "/blob/" in text and "huggingface.co" in text:
        return f"{text} is a page about a file", text.replace("/blob/", "/resolve/", 1)
    is_page = scheme in ("http", "https") and "/resolve/" not in text
    is_set = scheme == "hf" and found["rest"].count("/") < 3
    if (is_page or is_set) and (hub := _hub_id(text)):
        return f"{text} is a URL of a whole dataset, and its hub id is expected", hub
    return None


def _hub_id(text: str) -> str | None:
    found = _URL.match(text)
    hub = _HUB.match(found["rest"]) if found and scheme_of(text) in ("http", "https", "hf") else None
    return (hub["id"] or hub["data"]) if hub else None


def _check_no_url(text: str) -> str:
    if problem := url_problem(text):
        raise ValueError(f"{problem[0]}; expected {problem[1]}")
    return text


def _check_data_url(text: str) -> str:
    if problem := data_url_problem(text):
        raise ValueError(f"{problem[0]}; expected {problem[1]}")
    return text


NoURL = Annotated[str, AfterValidator(_check_no_url)]
"""A path or a hub id."""
DataPath = Annotated[str, AfterValidator(_check_data_url)]
"""A path, a hub id or a URL of data files."""
