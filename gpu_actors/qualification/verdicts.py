"""Verdicts: the results of proofs, kept on disk beside the cubins that were proved.

A verdict is about one cubin on one machine, and its file is named after both. The file has the cubin cache's locks,
checksum and rules for owners, because a user who can change it decides which code runs. A file of the same name that
ends in ".npz" holds the arrays on which a kernel was wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import gpu_actors._version as version
from gpu_actors.compiling.cubin_entry import CorruptEntry, EntryName, digest_of, seal, unseal
from gpu_actors.compiling.cubin_folder import CacheFolder
from gpu_actors.compiling.source import Cubin
from gpu_actors.devices.interface import Kernel
from gpu_actors.errors import InvalidRequest

__all__ = ["Outcome", "Verdict", "VerdictName", "Verdicts"]

Outcome: TypeAlias = Literal["qualified", "quarantined", "suspect"]

_log = logging.getLogger("gpu_actors")
_MAGIC = b"GAPROOF\x01"
_SCHEMA = 3
"""Raise it when trials, tolerances or the meaning of a verdict change."""
_MAX_BYTES, _MAX_EVIDENCE_BYTES = 8 << 20, 128 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a proof.

    outcome: "suspect" if the device was lost during the proof. Another kernel may have caused this.
    experiments, seconds: the number of experiments, and how long they took.
    problem, reason: the problem that the kernel computed wrongly, and how wrong it was.
    """

    outcome: Outcome
    experiments: int = 0
    seconds: float = 0.0
    problem: str = ""
    reason: str = ""


class VerdictName(tuple[str, str]):
    """The two digests in the name of a verdict's file: of the variant, and of the cubin with the machine."""

    __slots__ = ()

    @property
    def stem(self) -> str:
        return "-".join(self)


class Verdicts:
    """The verdicts of one machine in a folder. Any thread may use it.

    identity: the machine's, from `Device.identity`.
    """

    def __init__(self, path: Path, identity: tuple[str, ...]) -> None:
        self._identity = identity
        self._folder = CacheFolder(path, writable=True, suffix=".verdict")
        self._evidence = CacheFolder(path, writable=True, suffix=".npz")

    def name(self, key: EntryName, product: Cubin | Kernel) -> VerdictName:
        """Return the name of a product's verdict. key: that of the product's variant."""
        code = hashlib.sha256(product.data).hexdigest() if isinstance(product, Cubin) else ""
        groups = ([str(_SCHEMA)], [version.__version__], list(self._identity), [key.variant, key.build or ""], [code])
        return VerdictName((key.variant, digest_of(groups)))

    def read(self, name: VerdictName) -> Verdict | None:
        """Return a verdict, or None if there is none or its file is damaged. A damaged file is set aside."""
        file = f"{name.stem}.verdict"
        try:
            stored = self._folder.read(file)
            if stored is None:
                return None
            try:
                if stored.fault:
                    raise CorruptEntry(stored.fault)
                return _decoded(unseal(_MAGIC, name[1], stored.data))
            except CorruptEntry as error:
                _log.warning("the verdict %s is refused (%s), and its kernel proved again", file, error)
                self._folder.quarantine(file, stored.inode)
        except (OSError, InvalidRequest) as error:
            _log.warning("the verdict %s cannot be read: %s", file, error)
        return None

    @contextlib.contextmanager
    def locked(self, name: VerdictName, timeout: float) -> Iterator[bool]:
        """Keep other processes from proving the same. Yields False if there is no lock: the verdict is not kept."""
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(self._folder.locked(name[1], timeout))
                held = True
            except (OSError, InvalidRequest) as error:  # TimeoutError is an OSError
                _log.warning("the verdict %s is not kept: %s", name.stem, error)
                held = False
            yield held

    def publish(self, name: VerdictName, verdict: Verdict, evidence: bytes | None = None) -> str | None:
        """Keep a verdict. evidence: the contents of its .npz file. Returns that file's path if it could be kept."""
        text = json.dumps(dataclasses.asdict(verdict), sort_keys=True).encode()
        path: str | None = None
        try:
            if evidence is not None:
                file = f"{name.stem}.npz"
                self._evidence.publish(file, evidence)
                self._evidence.prune(_MAX_EVIDENCE_BYTES, keep=file)
                path = str(self._folder.path / file)
            file = f"{name.stem}.verdict"
            self._folder.publish(file, seal(_MAGIC, name[1], text))
            self._folder.prune(_MAX_BYTES, keep=file)
        except (OSError, InvalidRequest) as error:
            _log.warning("the verdict %s cannot be kept: %s", name.stem, error)
        return path

    def evidence(self, name: VerdictName) -> str | None:
        path = self._folder.path / f"{name.stem}.npz"
        return str(path) if path.exists() else None


def _decoded(payload: memoryview) -> Verdict:
    try:
        fields = json.loads(bytes(payload))
        verdict = Verdict(**fields)
    except (ValueError, TypeError) as error:
        raise CorruptEntry(f"it cannot be read: {error}") from error
    if verdict.outcome not in ("qualified", "quarantined", "suspect"):
        raise CorruptEntry(f"its outcome is {verdict.outcome!r}")
    return verdict
