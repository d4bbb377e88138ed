"""Where policy versions lie: safetensors directories with a manifest, at an fsspec URL.

A local folder is used in place, without a copy; anything else is mirrored through a local folder. A version that was
published never changes.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlparse

import fsspec

from libs.common import manifest
from libs.common.errors import JigsawError
from libs.common.tokens import PolicyVersion


class PolicyStore:
    """Publishes, fetches and prunes policy versions. Its methods block on files: call them in a thread.

    Args:
        url: fsspec URL or folder of all jobs' policies.
        mirror: local folder for copies of versions that lie elsewhere.
    """

    def __init__(self, url: str, *, mirror: Path) -> None:
        scheme = urlparse(url).scheme
        self._local = Path(urlparse(url).path if scheme == "file" else url) if scheme in ("", "file") else None
        self._url = url.rstrip("/")
        self._mirror = self._local or mirror

    def prepare(self, job_uid: str, version: PolicyVersion) -> Path:
        """An empty folder to write a version into, before :meth:`complete`.

        Raises:
            JigsawError: it can't be made.
        """
        return manifest.prepare(self._folder(job_uid, version))

    def complete(self, job_uid: str, version: PolicyVersion) -> str:
        """Make a version that was written into the prepared folder visible; returns its digest.

        Raises:
            JigsawError: it can't be written.
        """
        folder = self._folder(job_uid, version)
        manifest.complete(folder, durable=False)
        if self._local is None:
            with _elsewhere(self._url):
                filesystem, path = fsspec.core.url_to_fs(self.url(job_uid, version))
                filesystem.put(f"{folder}/", f"{path}/", recursive=True)
        return manifest.digest(folder)

    def url(self, job_uid: str, version: PolicyVersion) -> str:
        """Where a version lies."""
        return f"{self._url}/{job_uid}/{version}"

    def fetch(self, job_uid: str, version: PolicyVersion, *, digest: str) -> Path:
        """A local folder with a version, checked against its digest.

        Raises:
            JigsawError: missing, incomplete or not what was published.
        """
        folder = self._folder(job_uid, version)
        if self._local is None and not folder.exists():
            partial = manifest.prepare(folder)
            with _elsewhere(self._url):
                filesystem, path = fsspec.core.url_to_fs(self.url(job_uid, version))
                if not filesystem.exists(f"{path}/{manifest.MANIFEST}"):
                    raise JigsawError(f"policy {version} of {job_uid} isn't at {self._url}")
                filesystem.get(f"{path}/", f"{partial}/", recursive=True)
            (partial / manifest.MANIFEST).unlink()  # made anew from what has arrived: its digest tells whether all is well
            manifest.complete(folder, durable=False)
        manifest.verify(folder, contents=False)
        if manifest.digest(folder) != digest:
            raise JigsawError(f"policy {version} of {job_uid} is not the one that was published")
        return folder

    def prune(self, job_uid: str, *, before: PolicyVersion) -> None:
        """Delete a job's versions older than one, here and where they lie. Newer ones may be a successor's."""
        self.prune_mirror(job_uid, before=before)
        if self._local is None:
            with _elsewhere(self._url):
                filesystem, path = fsspec.core.url_to_fs(f"{self._url}/{job_uid}")
                for folder in filesystem.ls(path, detail=False) if filesystem.exists(path) else []:
                    if _is_older(folder.rstrip("/").rsplit("/", 1)[-1], before):
                        filesystem.rm(folder, recursive=True)

    def prune_copies(self, job_uid: str, *, before: PolicyVersion) -> None:
        """Delete this machine's copies of older versions that lie elsewhere; ones that lie here are their trainer's."""
        if self._local is None:
            self.prune_mirror(job_uid, before=before)

    def prune_mirror(self, job_uid: str, *, before: PolicyVersion) -> None:
        """Delete what this machine has of versions older than one, half-written ones included."""
        mirror = self._mirror / job_uid
        for folder in (*mirror.glob("[0-9]*"), *manifest.partials(mirror)):
            if _is_older(folder.name.removeprefix(".").removesuffix(".partial"), before):
                shutil.rmtree(folder, ignore_errors=True)

    def forget(self, job_uid: str) -> None:
        """Delete all versions of a job, here and where they lie."""
        shutil.rmtree(self._mirror / job_uid, ignore_errors=True)
        if self._local is None:
            with _elsewhere(self._url):
                filesystem, path = fsspec.core.url_to_fs(f"{self._url}/{job_uid}")
                if filesystem.exists(path):
                    filesystem.rm(path, recursive=True)

    def forget_copies(self, job_uid: str) -> None:
        """Delete this machine's copies of a job's versions that lie elsewhere."""
        if self._local is None:
            shutil.rmtree(self._mirror / job_uid, ignore_errors=True)

    def _folder(self, job_uid: str, version: PolicyVersion) -> Path:
        return self._mirror / job_uid / str(version)


def _is_older(name: str, than: PolicyVersion) -> bool:
    version = PolicyVersion.parse(name)
    return version is not None and version.age < than.age


@contextmanager
def _elsewhere(url: str) -> Iterator[None]:
    """The boundary to a foreign file system: whatever its library raises means that it can't be reached or written."""
    try:
        yield
    except JigsawError:
        raise
    except Exception as error:
        raise JigsawError(f"{url}: {type(error).__name__}: {error}") from error
