"""Blobs: the bytes of files, in a folder or an object store (STORE_URL, through fsspec). Call from threads only."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Self

import fsspec

from service.errors import SettingError, StoreFailed

CHUNK_BYTES = 1 << 20
_DRAFT_SUFFIX = ".part"  # of a blob that is being written


class BlobMissing(StoreFailed):
    """A file's bytes are not in the file store; check STORE_URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes that were written whole. `path` is relative to STORE_URL and safe to keep in a row."""

    path: str
    size_bytes: int
    sha256: bytes


@contextmanager
def _store_errors(path: str) -> Iterator[None]:
    """Whatever a file store raises, as StoreFailed."""
    try:
        yield
    except FileNotFoundError as error:
        raise BlobMissing(f"({path})") from error
    except OSError as error:
        raise StoreFailed(f"({path}: {error.strerror or type(error).__name__})") from error
    except Exception as error:
        raise StoreFailed(f"({path}: {type(error).__name__})") from error


class Blobs:
    """The file store of this installation. Threads share it; it holds no open file."""

    def __init__(self, location: str) -> None:
        """`location`: a folder, or a URL that fsspec knows. Raises SettingError where its protocol is unknown."""
        try:
            self._files, self._root = fsspec.core.url_to_fs(location)
        except (ValueError, ImportError) as error:
            raise SettingError(f"STORE_URL: {error}") from error
        self._is_folder = "file" in _protocols(self._files)

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def writer(self, path: str) -> BlobWriter:
        """Begin to write `path`. Nothing is there under that name until `publish`."""
        return BlobWriter(self._files, path=path, full=self._full(path), sync=self._is_folder)

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        """The blob's bytes from `offset` on; the caller closes it. Raises BlobMissing, StoreFailed."""
        with _store_errors(path):
            stream: BinaryIO = self._files.open(self._full(path), "rb")
            try:
                stream.seek(offset)
            except BaseException:
                stream.close()
                raise
        return stream

    def read(self, path: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Chunks of the bytes from `start` up to `stop`. Opened before the first chunk is asked for."""
        return _chunks(self.open(path, start), path, None if stop is None else stop - start)

    def size(self, path: str) -> int:
        """Raises BlobMissing, StoreFailed."""
        with _store_errors(path):
            return int(self._files.info(self._full(path))["size"])

    def delete(self, path: str) -> None:
        """Remove the blob; one that is not there is no error."""
        with _store_errors(path):
            try:
                self._files.rm_file(self._full(path))
            except FileNotFoundError:
                return

    def sweep_drafts(self, path: str) -> int:
        """Remove what writers of `path` left behind when they were killed; how many. The caller is the only writer."""
        folder = os.path.dirname(self._full(path))
        with _store_errors(path):
            self._files.invalidate_cache()
            found = self._files.ls(folder, detail=False) if self._files.isdir(folder) else []
            drafts = [name for name in found if _is_draft(os.path.basename(name), os.path.basename(path))]
            for name in drafts:
                self._files.rm_file(name)
        return len(drafts)

    def check(self) -> None:
        """Raise StoreFailed unless a byte can be written and taken away again."""
        path = f".probe-{secrets.token_hex(8)}"
        with self.writer(path) as writer:
            writer.write(b"1")
            writer.publish()
        self.delete(path)


class BlobWriter:
    """Writes under a temporary name, hashes on the way, and renames when told to: whole or not at all.

    A context manager: what was not published is removed at its end.
    """

    def __init__(self, files: Any, *, path: str, full: str, sync: bool) -> None:
        self._files, self._path, self._full, self._sync = files, path, full, sync
        self._draft = f"{full}.{secrets.token_hex(8)}{_DRAFT_SUFFIX}"
        self._hash = hashlib.sha256()
        self._done = False
        self.bytes = 0
        with _store_errors(path):
            if sync:
                files.makedirs(os.path.dirname(full), exist_ok=True)
            self._stream = files.open(self._draft, "wb")

    def write(self, data: bytes) -> None:
        with _store_errors(self._path):
            self._stream.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def publish(self) -> Blob:
        """Make the bytes durable and give them their name. Raises StoreFailed, and then nothing is there."""
        with _store_errors(self._path):
            if self._sync:
                # The row that names this blob is committed next: after a power cut both are there, or neither.
                self._stream.flush()
                os.fsync(self._stream.fileno())
            self._stream.close()
            self._files.mv(self._draft, self._full)
        self._done = True
        return Blob(path=self._path, size_bytes=self.bytes, sha256=self._hash.digest())

    def discard(self) -> None:
        """Remove what was written. Does nothing after `publish`."""
        if self._done:
            return
        self._done = True
        with _store_errors(self._path):
            self._stream.close()
            try:
                self._files.rm_file(self._draft)
            except FileNotFoundError:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def new_blob_path(folder: str) -> str:
    """A path that nobody else has, below `folder`, spread over 256 folders. Never made from a client's file name."""
    token = secrets.token_hex(16)
    return f"{folder}/{token[:2]}/{token}"


def _is_draft(name: str, of: str) -> bool:
    return name.startswith(f"{of}.") and name.endswith(_DRAFT_SUFFIX)


def _chunks(stream: BinaryIO, path: str, length: int | None) -> Iterator[bytes]:
    with stream:
        left = length
        while left is None or left > 0:
            with _store_errors(path):
                chunk = stream.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
            if not chunk:
                return
            left = None if left is None else left - len(chunk)
            yield chunk


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)
