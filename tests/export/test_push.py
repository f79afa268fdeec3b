"""A push uploads the complete export and nothing else, in one commit; a dry run makes no request."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from safetensors.numpy import save

from biphasic.errors import UserError
from biphasic.export.card import untrained_card
from biphasic.export.folder import EXPORT_FILE
from biphasic.export.push import _with_repo, files_of, push
from helpers.ports import free_port
from helpers.push_hub import READS, WRITES, Hub, serve_models

CONFIG = {"run_name": "x", "seed": 0, "model": {"init_from": "EuroBERT/EuroBERT-210m"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of an export, and other files beside them."""
    out = tmp_path / "my-encoder"
    files = {
        EXPORT_FILE: b"{}",
        "config.json": b'{"model_type": "eurobert"}',
        "model.safetensors": save({"weight": np.zeros(2540, "float32")}),
        "tokenizer.json": b"{}",
        "1_Pooling/config.json": b"{}",
        "onnx/model.onnx": b"graph" * 100,
        "README.md": untrained_card(CONFIG, "my-encoder").encode(),
    }
    excluded = (
        ".env", ".git/config", ".onnx.partial/model.onnx", ".cache/x", "1_Pooling/.secret", "model.safetensors.partial",
        "x.partial/weights.safetensors", "__pycache__/code.cpython-311.pyc", "notes.tmp", "README.md~", "a.lock",
    )  # fmt: skip
    for name, content in {**files, **dict.fromkeys(excluded, b"secret")}.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    return out


UPLOADED = {
    "1_Pooling/config.json", "README.md", "biphasic.json", "config.json", "model.safetensors", "onnx/model.onnx",
    "tokenizer.json",
}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Hub, dict[str, str]]]:
    with serve_models(tmp_path / "home") as served:
        yield served


def run(
    environment: dict[str, str], folder: Path, *arguments: str, token: str | None = WRITES
) -> subprocess.CompletedProcess[str]:
    tokens = {} if token is None else {"HF_TOKEN": token}
    command = [sys.executable, "-m", "biphasic", "push", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**environment, **tokens}, timeout=120)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_push_is_one_commit(hub: tuple[Hub, dict[str, str]], folder: Path) -> None:
    served, environment = hub
    done = run(environment, folder, "org/encoder", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"org/encoder: 7 files: {environment['HF_ENDPOINT']}/org/encoder/commit/1\n"
    model = served.models["org/encoder"]
    assert model.private
    assert model.commits == [("main", "Export of biphasic: my-encoder", 7)]
    files = model.branches["main"]
    assert set(files) == UPLOADED | {".gitattributes"}
    for name in UPLOADED - {"README.md"}:
        assert files[name] == (folder / name).read_bytes(), name
    # The uploaded card names the repository; the folder's card stays.
    card = files["README.md"].decode()
    assert 'AutoModel.from_pretrained("org/encoder")' in card
    assert 'AutoTokenizer.from_pretrained("org/encoder")' in card
    assert 'SentenceTransformer("org/encoder")' in card
    assert '"my-encoder"' in (folder / "README.md").read_text()
    assert ModelCard(card).data.to_dict() == ModelCard((folder / "README.md").read_text()).data.to_dict()


def test_weights_of_an_earlier_push_are_deleted(hub: tuple[Hub, dict[str, str]], folder: Path) -> None:
    """transformers would load the old single file instead of the new shards."""
    served, environment = hub
    (folder / "onnx" / "model_int8.onnx").write_bytes(b"graph")
    (folder / "onnx" / "model_int8.onnx.data").write_bytes(b"weights")
    assert run(environment, folder, "org/encoder").returncode == 0
    files = served.models["org/encoder"].branches["main"]
    files["LICENSE"] = b"a person's own"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    for graph in (folder / "onnx").iterdir():
        graph.unlink()
    done = run(environment, folder, "org/encoder")
    assert "4 of an earlier push removed" in done.stdout
    assert len(served.models["org/encoder"].commits) == 2
    removed = {"model.safetensors", "onnx/model.onnx"}
    new = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    assert set(files) == (UPLOADED - removed) | new | {".gitattributes", "LICENSE"}


def test_checkpoints_as_revisions(hub: tuple[Hub, dict[str, str]], folder: Path) -> None:
    served, environment = hub
    for _ in range(2):  # the branch is created, and exists the second time
        done = run(environment, folder, "org/encoder", "--revision", "step-1000")
        assert done.returncode == 0, done.stderr
    assert "org/encoder at step-1000: 7 files" in done.stdout
    branches = served.models["org/encoder"].branches
    assert set(branches["main"]) == {".gitattributes"}
    assert set(branches["step-1000"]) == UPLOADED | {".gitattributes"}
    card = branches["step-1000"]["README.md"].decode()
    assert 'AutoModel.from_pretrained("org/encoder", revision="step-1000")' in card


def test_refusals_of_the_hub_are_errors_of_one_line(hub: tuple[Hub, dict[str, str]], folder: Path) -> None:
    served, environment = hub
    assert "the token is not valid (401)" in one_line(run(environment, folder, "org/encoder", token="hf_wrong"))
    assert "may not write to org/encoder (403)" in one_line(run(environment, folder, "org/encoder", token=READS))
    served.card_errors.append('"license" must be one of [apache-2.0, …]')
    error = one_line(run(environment, folder, "org/encoder"))
    assert 'Invalid metadata in README.md. - "license" must be one of' in error
    assert served.models["org/encoder"].commits == []
    unreachable = {**environment, "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    assert "can't be reached (ConnectError): try again" in one_line(run(unreachable, folder, "org/encoder"))
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    assert "HF_HUB_OFFLINE" in one_line(run(offline, folder, "org/encoder"))


def test_without_a_token_there_is_no_request(hub: tuple[Hub, dict[str, str]], folder: Path) -> None:
    served, environment = hub
    assert "no token for the hub: set HF_TOKEN" in one_line(run(environment, folder, "org/encoder", token=None))
    assert served.requests == []


def test_a_dry_run_makes_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(*arguments: object, **keys: object) -> None:
        raise AssertionError("a dry run has opened a socket")

    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    push(folder, "org/encoder", revision="step-1000", private=True, dry_run=True)
    listed, _, rest = capsys.readouterr().out.partition("would be pushed to ")
    *lines, total = [line.split(maxsplit=1) for line in listed.splitlines()]
    sizes = {name: int(size.replace(",", "")) for size, name in lines}
    assert set(sizes) == UPLOADED
    assert sizes["model.safetensors"] == 10_240
    assert total == [f"{sum(sizes.values()):,}", "bytes in 7 files"]
    target, _, metadata = rest.partition("\n")
    assert target == "org/encoder at step-1000 (created as a private repository if missing), with this metadata:"
    assert yaml.safe_load(metadata)["base_model"] == "EuroBERT/EuroBERT-210m"


def test_unusable_folders_and_names_are_refused(folder: Path, tmp_path: Path) -> None:
    for repo in ("encoder", "a/b/c", "org/", "org/has space", "org/-x", "org/a..b"):
        with pytest.raises(UserError, match=f"push {repo}"):
            push(folder, repo, dry_run=True)
    with pytest.raises(UserError, match="is not an exported folder"):
        push(tmp_path, "org/encoder", dry_run=True)
    card = folder / "README.md"
    before = card.read_text()
    card.write_text(before.replace("EuroBERT/EuroBERT-210m\n", "not a model\n", 1))
    with pytest.raises(UserError, match="base_model 'not a model' is not an id"):
        push(folder, "org/encoder", dry_run=True)
    card.unlink()
    with pytest.raises(UserError, match=r"README\.md can't be read"):
        push(folder, "org/encoder", dry_run=True)
    card.write_text(before)
    (tmp_path / "secret").write_text("elsewhere")
    os.symlink(tmp_path / "secret", folder / "notes.txt")
    with pytest.raises(UserError, match=r"notes\.txt: is a link"):
        push(folder, "org/encoder", dry_run=True)
    (folder / "notes.txt").unlink()
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:3000], whole[:5], b""):
        weights.write_bytes(content)
        with pytest.raises(UserError, match=rf"push {weights}: can't be read, so the model is not complete \(.*header"):
            push(folder, "org/encoder", dry_run=True)
    weights.write_bytes(whole)
    assert set(files_of(folder)) == UPLOADED


def test_the_code_of_fine_tuned_models_names_the_repository() -> None:
    code = 'classify = pipeline("text-classification", model="mine", trust_remote_code=True)'
    assert _with_repo(code, "org/m", "v1") == code.replace('"mine"', '"org/m", revision="v1"')
