"""PrefixIndex: finds the pages that hold the beginning of a prompt, by what is in it.

A page is named by a hash of its own tokens and of everything before them (as in vLLM's automatic prefix caching,
Kwon et al., arXiv 2309.06180, section 4.4), so equal names mean equal keys and values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_actors.errors import InvalidRequest
from gpu_actors.values import show

__all__ = ["PrefixIndex", "page_digests"]

_REASON = "must be token ids: a sequence of ints, or an integer array of one axis"


def page_digests(tokens: Sequence[int] | Any, page_size: int) -> list[bytes]:
    """A name for each whole page that these tokens fill. Raises `InvalidRequest` for what are no token ids."""
    try:
        ids = np.asarray(tokens)
    except Exception:
        raise InvalidRequest("tokens", show(tokens), _REASON) from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidRequest("tokens", show(tokens), _REASON)
    ids = ids.astype("<i8")
    digests: list[bytes] = []
    chain = b""
    # The last token is never found: whoever has all but it still needs a row to ask with.
    for page in range(max(0, ids.size - 1) // page_size):
        content = ids[page * page_size : (page + 1) * page_size].tobytes()
        chain = hashlib.sha256(chain + content).digest()
        digests.append(chain)
    return digests


class PrefixIndex:
    """Pages by their names, and names by page."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest known beginning."""
        pages: list[int] = []
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def add(self, digest: bytes, page: int) -> bool:
        """Name a page. False where another page has that name already."""
        if digest in self._pages:
            return False
        self._pages[digest] = page
        self._names[page] = digest
        return True

    def forget(self, page: int) -> None:
        """Take a page's name away."""
        del self._pages[self._names.pop(page)]
