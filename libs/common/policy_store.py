"""Where policy versions lie: safetensors directories with a manifest, at an fsspec URL.

A local folder is used in place, without a copy; anything else is mirrored through a local folder. A version that was
published never changes.
"""

import shutil
from collections.abc import Collection, Iterator
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

    @contextmanager
    def writing(self, job_uid: str, version: PolicyVersion) -> Iterator[Path]:
        """A folder to write a version into; complete and visible when the block ends well.

        Raises:
            JigsawError: it can't be written.
        """
        target = self._mirror / job_uid / str(version)
        with manifest.complete_or_invisible(target, durable=False) as folder:
            yield folder
        if self._local is None:
            filesystem, path = fsspec.core.url_to_fs(self.url(job_uid, version))
            filesystem.put(f"{target}/", f"{path}/", recursive=True)

    def url(self, job_uid: str, version: PolicyVersion) -> str:
        """Where a version lies."""
        return f"{self._url}/{job_uid}/{version}"

    def digest(self, job_uid: str, version: PolicyVersion) -> str:
        """Digest of a version that this process wrote or fetched."""
        return manifest.digest(self._mirror / job_uid / str(version))

    def fetch(self, job_uid: str, version: PolicyVersion, *, digest: str) -> Path:
        """A local folder with a version, checked against its digest.

        Raises:
            JigsawError: missing, incomplete or not what was published.
        """
        folder = self._mirror / job_uid / str(version)
        if self._local is None and not folder.exists():
            filesystem, path = fsspec.core.url_to_fs(self.url(job_uid, version))
            with manifest.complete_or_invisible(folder, durable=False) as aside:
                filesystem.get(f"{path}/", f"{aside}/", recursive=True)
        manifest.verify(folder, contents=self._local is None)
        if manifest.digest(folder) != digest:
            raise JigsawError(f"policy {version} of {job_uid} is not the one that was published")
        return folder

    def prune(self, job_uid: str, *, keep: Collection[PolicyVersion]) -> None:
        """Delete all versions of a job but these; without any to keep, the job's whole folder."""
        if not keep and self._local is not None:
            shutil.rmtree(self._mirror / job_uid, ignore_errors=True)
            return
        kept = {str(version) for version in keep}
        for folder in (self._mirror / job_uid).glob("[0-9]*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        if self._local is None:
            filesystem, path = fsspec.core.url_to_fs(f"{self._url}/{job_uid}")
            for folder in filesystem.ls(path, detail=False):
                if folder.rstrip("/").rsplit("/", 1)[-1] not in kept:
                    filesystem.rm(folder, recursive=True)
