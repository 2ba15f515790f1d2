"""What a name stands for: folders and files first, then names, then the hub. No test uses a network."""

import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub import errors

import whisperport.model.checkpoint.load as load_module
from whisperport.errors import CheckpointError, MissingPackageError, UsageError
from whisperport.model.checkpoint import by_name, download, load_checkpoint
from whisperport.model.checkpoint.names import HUB_IDS
from whisperport.speech.data import embedded_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch, tmp_path):
    """No cache holds official weights, and OpenAI's server cannot be reached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(by_name, "SERVER", "http://127.0.0.1:1")
    monkeypatch.setattr(download, "ATTEMPTS", 1)


@pytest.fixture
def loaded(monkeypatch):
    """Which folders are loaded under which names, without loading them."""
    calls = []
    monkeypatch.setattr(load_module, "check_config_files", lambda folder: None)
    monkeypatch.setattr(
        load_module,
        "load_folder",
        lambda folder, *, name, revision="": calls.append((folder.name, name, revision)),
    )
    return calls


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that has every repository; it records what it was asked for."""
    asked = []
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()

    def snapshot_download(repo_id, *, revision=None, allow_patterns=None, local_files_only=False):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not here")
        asked.append((repo_id, revision, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def rejection(source, **options):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(source, **options)
    assert caught.value.why
    assert caught.value.hint
    return caught.value


def test_a_short_name_is_fetched_from_its_place_on_the_hub(hub, loaded):
    load_checkpoint("turbo")

    assert {repo for repo, _, _ in hub} == {"openai/whisper-large-v3-turbo"}
    assert loaded == [(COMMIT, "turbo", COMMIT)]


def test_a_hub_id_is_fetched_at_the_revision_asked_for(hub, loaded):
    load_checkpoint("someone/whisper-finetuned", revision="v2")

    assert {(repo, revision) for repo, revision, _ in hub} == {("someone/whisper-finetuned", "v2")}
    assert loaded == [(COMMIT, "someone/whisper-finetuned", COMMIT)]


def test_only_files_that_are_read_are_fetched(hub, loaded):
    load_checkpoint("tiny")

    (_, _, patterns) = hub[-1]
    assert {"config.json", "model.safetensors", "model-*-of-*.safetensors"} <= set(patterns)
    # Neither other precisions nor code, and no pattern that would match them.
    assert not {"*", "*.safetensors", "*.bin", "*.py", "*.json"} & set(patterns)


def test_a_repository_without_safetensors_is_asked_for_its_other_files(
    hub, monkeypatch, altered_folder
):
    folder = altered_folder(without=("model.safetensors",))
    asked = []

    def snapshot_download(repo_id, *, revision, allow_patterns):
        asked.append(allow_patterns)
        if "pytorch_model.bin" in allow_patterns:
            (folder / "pytorch_model.bin").write_bytes(b"not one")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    error = rejection("someone/old")

    assert len(asked) == 4  # the texts, then each kind of weights
    assert "pytorch_model.bin" in error.what


def test_gigabytes_of_another_model_are_not_fetched(hub, tmp_path):
    (tmp_path / "snapshots" / COMMIT / "config.json").write_text('{"model_type": "llama"}')

    error = rejection("someone/llama-70b")

    assert "'llama'" in error.why
    assert len(hub) == 1
    assert not any("safetensors" in pattern for pattern in hub[0][2])


@pytest.mark.parametrize("name", ["tiny", "default", "openai/whisper-base"])
def test_a_folder_here_wins_over_a_name_and_a_hub_id(name, hub, loaded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir(parents=True)

    load_checkpoint(name)

    assert loaded == [(Path(name).name, name, "")]
    assert hub == []


def test_default_is_the_model_inside_the_package(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    checkpoint = load_checkpoint("default")

    digest = (
        "08ffee7fd9c680dd87d5c02430b0c0245bf87f5b4ce4fc4d50cdd6a79cd5e7f3"  # before compression
    )
    assert checkpoint.source.sha256 == {"model.safetensors": digest}
    assert (checkpoint.source.name, checkpoint.warnings) == ("default", ())


def test_a_missing_default_is_an_error(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded_model, "model_folder", lambda: tmp_path / "none")

    error = rejection("default")

    assert "no embedded model" in error.what


@pytest.mark.parametrize(
    "name",
    [
        "tiny-en",
        "trubo",
        "./no/such",
        "no/such/file.pt",
        "a b",
        "\0",
        "x" * 5000,
        "~nobody/tiny.pt",
    ],
)
def test_an_unknown_name_is_rejected_with_the_known_ones(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    error = rejection(name)

    assert "no checkpoint" in error.what
    assert "did you mean" in error.hint or "known names" in error.hint


def test_a_misspelt_name_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert "turbo" in rejection("trubo").hint
    assert "tiny.en" in rejection("tiny-en").hint


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", "give the folder"),
        ("config.json", "give the folder"),
        ("speech.wav", "give a folder, a .pt file"),
        ("noname", "give a folder, a .pt file"),
    ],
)
def test_a_file_of_another_kind_is_rejected_with_what_to_give(file, message, tmp_path):
    (tmp_path / file).write_bytes(b"x")

    assert message in rejection(tmp_path / file).hint


def test_a_revision_of_a_folder_is_rejected(tiny_checkpoint_folder):
    with pytest.raises(UsageError, match="has no revisions"):
        load_checkpoint(tiny_checkpoint_folder, revision="main")


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(hub):
    rejection(Path("openai/whisper-tiny"))

    assert hub == []


def test_without_the_hub_package_the_error_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(MissingPackageError) as caught:
        load_checkpoint("tiny")

    assert "whisperport[export]" in caught.value.hint


def response_error(kind):
    """The hub's HTTP errors need a response; building one depends on the HTTP library below."""
    error = kind.__new__(kind)
    Exception.__init__(error, "the hub's own words\nand more")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (response_error(errors.RepositoryNotFoundError), "the repository does not exist"),
        (response_error(errors.GatedRepoError), "grant you access"),
        (response_error(errors.RevisionNotFoundError), "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("no"), "no copy in the local cache"),
        (errors.OfflineModeIsEnabled("no"), "no copy in the local cache"),
        (errors.HFValidationError("bad id"), "bad id"),
        (OSError("disk full"), "disk full"),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_failure_of_the_hub_has_a_reason(error, message, monkeypatch, tmp_path):
    def snapshot_download(*_args, **_options):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    found = rejection("someone/model", revision="v9")

    assert message in found.why
    assert found.__cause__ is error


def test_offline_with_an_empty_cache_is_reported_by_the_real_hub_package(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    error = rejection("tiny")

    assert "no copy in the local cache" in error.why, version("huggingface_hub")


def test_offline_with_a_copy_in_the_cache_loads_it(monkeypatch, tmp_path, tiny_checkpoint_folder):
    repository = tmp_path / "models--openai--whisper-tiny"
    shutil.copytree(tiny_checkpoint_folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    checkpoint = load_checkpoint("tiny")

    assert checkpoint.source.revision == COMMIT


def test_every_short_name_of_openai_whisper_is_known():
    import whisper

    assert set(whisper.available_models()) <= set(HUB_IDS)


def test_a_folder_that_may_not_be_read_is_a_fault_of_the_checkpoint(monkeypatch, tmp_path):
    def denied(folder):
        raise PermissionError(13, "Permission denied", str(folder / "model.bin"))

    monkeypatch.setattr(load_module, "is_ctranslate2", denied)

    with pytest.raises(CheckpointError, match="cannot read") as raised:
        load_checkpoint(tmp_path)

    assert "Permission denied" in raised.value.why
    assert "permissions" in raised.value.hint
