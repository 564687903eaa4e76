"""URLs, which no key takes: a path is on this machine, and what is on the hub goes by its id."""

import re
from typing import Annotated

from pydantic import AfterValidator

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_HUB = re.compile(r"(?:www\.)?huggingface\.co/(?:datasets/)?(?P<id>[^/]+/[^/?#]+)|datasets/(?P<data>[^/]+/[^/@]+)")
"""What stands behind the scheme of a page of the hub, or of fsspec's `hf://datasets/..`."""


def is_url(text: str) -> bool:
    """Whether a text begins with a scheme (`s3://`, `https://`); it is no path then."""
    return _URL.match(text) is not None


def url_problem(text: str) -> tuple[str, str] | None:
    """Why a URL is not read and what to write instead; None where the text is no URL."""
    found = _URL.match(text)
    if found is None:
        return None
    scheme, rest = found["scheme"].lower(), found["rest"]
    if scheme == "file":
        return f"{text} is a URL, and a path is expected", f"/{rest.lstrip('/')}"
    if (scheme in ("http", "https", "hf")) and (hub := _HUB.match(rest)):
        return f"{text} is a URL, and a hub id or a path is expected", hub["id"] or hub["data"]
    return (
        f"{scheme}:// is remote storage, which is neither read nor written",
        "a local copy, a mounted folder or a hub id",
    )


def _check_no_url(text: str) -> str:
    if problem := url_problem(text):
        raise ValueError(f"{problem[0]}; expected {problem[1]}")
    return text


NoURL = Annotated[str, AfterValidator(_check_no_url)]
"""A path or a hub id."""
