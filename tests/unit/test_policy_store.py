"""Policy versions at a folder and at a URL: complete or absent, checked when fetched, pruned on both sides."""

from pathlib import Path

import fsspec
import pytest

from libs.common.errors import JigsawError
from libs.common.policy_store import PolicyStore
from libs.common.tokens import PolicyVersion

ONE, TWO = PolicyVersion(1, 1), PolicyVersion(2, 1)


@pytest.fixture(params=["folder", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        return "memory://policies"
    return f"{'file://' if request.param == 'file' else ''}{tmp_path / 'policies'}"


def publish(store: PolicyStore, version: PolicyVersion, content: bytes = b"weights") -> str:
    folder = store.prepare("job", version)
    (folder / "model.safetensors").write_bytes(content)
    return store.complete("job", version)


def test_what_one_machine_publishes_another_fetches(url: str, tmp_path: Path) -> None:
    digest = publish(PolicyStore(url, mirror=tmp_path / "a"), ONE)
    folder = PolicyStore(url, mirror=tmp_path / "b").fetch("job", ONE, digest=digest)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_version_that_was_only_begun_cannot_be_fetched(url: str, tmp_path: Path) -> None:
    store = PolicyStore(url, mirror=tmp_path / "a")
    (store.prepare("job", ONE) / "model.safetensors").write_bytes(b"half")
    with pytest.raises(JigsawError):
        PolicyStore(url, mirror=tmp_path / "b").fetch("job", ONE, digest="?")


def test_another_content_than_the_one_published_is_refused(url: str, tmp_path: Path) -> None:
    digest = publish(PolicyStore(url, mirror=tmp_path / "a"), ONE)
    publish(PolicyStore(url, mirror=tmp_path / "a"), ONE, b"other weights")
    with pytest.raises(JigsawError, match="not the one that was published"):
        PolicyStore(url, mirror=tmp_path / "b").fetch("job", ONE, digest=digest)


def test_pruning_deletes_older_versions_and_forgetting_all(url: str, tmp_path: Path) -> None:
    store = PolicyStore(url, mirror=tmp_path / "a")
    publish(store, ONE)
    digest = publish(store, TWO)
    store.prune("job", before=TWO)
    fresh = PolicyStore(url, mirror=tmp_path / "b")
    fresh.fetch("job", TWO, digest=digest)
    with pytest.raises(JigsawError):
        fresh.fetch("job", ONE, digest=digest)
    store.forget("job")
    store.forget("job")  # of a job that has nothing left
    with pytest.raises(JigsawError):
        PolicyStore(url, mirror=tmp_path / "c").fetch("job", TWO, digest=digest)


def test_a_late_trainer_deletes_nothing_of_its_successor(url: str, tmp_path: Path) -> None:
    store = PolicyStore(url, mirror=tmp_path / "a")
    successor = PolicyVersion(ONE.step - 1, ONE.incarnation + 1)  # it went back to a checkpoint
    digest = publish(store, successor)
    store.prune("job", before=TWO)
    PolicyStore(url, mirror=tmp_path / "b").fetch("job", successor, digest=digest)


def test_trouble_with_a_foreign_file_system_is_one_clear_error(tmp_path: Path) -> None:
    store = PolicyStore("memory://policies", mirror=tmp_path)
    with pytest.raises(JigsawError, match="isn't at memory://policies"):
        store.fetch("job", ONE, digest="?")
    broken = PolicyStore("nosuchprotocol://policies", mirror=tmp_path)
    with pytest.raises(JigsawError, match=r"^nosuchprotocol://policies: ValueError: Protocol not known"):
        broken.fetch("job", ONE, digest="?")
