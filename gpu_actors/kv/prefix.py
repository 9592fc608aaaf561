"""PrefixIndex: finds the pages that hold the beginning of a prompt, by their content.

A page is named by a hash of its own tokens and of everything before them (as in vLLM's automatic prefix caching,
Kwon et al., arXiv 2309.06180, section 4.4), so equal names mean equal keys and values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_actors.errors import InvalidRequest
from gpu_actors.values import show

__all__ = ["PrefixIndex", "Tokens", "extend_digests", "prompt_digests", "token_ids"]

Tokens: TypeAlias = npt.NDArray[np.int64]


def token_ids(tokens: Any, shape: tuple[int, ...] | None = None, most: int | None = None) -> Tokens:
    """Token ids as int64, with one axis.

    shape: the shape that they must have. most: how many there may be.
    Raises `InvalidRequest` for anything else, before memory is allocated for more than ``most`` ids.
    """
    expected = "one axis" if shape is None else f"shape {shape}"
    if most is not None:
        expected = f"{expected}, at most {most}, which is what the cache holds"
    try:
        length = len(tokens)
        if length > (length if most is None else most) or (shape is not None and length != shape[0]):
            raise ValueError
        ids = np.asarray(tokens)
        sound = ids.dtype.kind in "iu" or ids.size == 0
        sound = sound and (ids.ndim == 1 if shape is None else ids.shape == shape)
    except Exception:
        sound = False
    if not sound:
        raise InvalidRequest("tokens", show(tokens), f"must be token ids: ints, of {expected}")
    return ids.astype("<i8").reshape(-1)


def extend_digests(digests: list[bytes], ids: Tokens, page_size: int) -> Tokens:
    """Append the names of the whole pages that these tokens fill to ``digests``. Returns the remaining tokens."""
    whole = len(ids) // page_size * page_size
    chain = digests[-1] if digests else b""
    for start in range(0, whole, page_size):
        chain = hashlib.sha256(chain + ids[start : start + page_size].tobytes()).digest()
        digests.append(chain)
    return ids[whole:]


def prompt_digests(tokens: Any, page_size: int, most: int | None = None) -> list[bytes]:
    """The names of a prompt's pages that a cache may have. most: how many tokens the cache holds.

    Raises what `token_ids` raises.
    """
    digests: list[bytes] = []
    # Never the last token: a sequence needs at least one new row to attend with.
    extend_digests(digests, token_ids(tokens, most=most)[:-1], page_size)
    return digests


class PrefixIndex:
    """Pages by their names, and names by page. It may have a later page of a prompt without the earlier ones."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest beginning that the index has."""
        pages: list[int] = []
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def add(self, digest: bytes, page: int) -> bool:
        """Name a page. False if another page has that name already."""
        if digest in self._pages:
            return False
        self._pages[digest] = page
        self._names[page] = digest
        return True

    def forget(self, page: int) -> None:
        """Remove a page."""
        del self._pages[self._names.pop(page)]
