"""The fingerprint of a model on the hub is its commit, for any revision that names it."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from biphasic.errors import UserError
from biphasic.model.hf_config import model_fingerprint


@pytest.mark.usefixtures("hub_is_offline")
def test_a_hub_model_s_fingerprint_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commits = {"main": "a" * 40, "refs/pr/1": "b" * 40}
    repository = tmp_path / "models--someone--model"
    for revision, commit in commits.items():
        LlamaConfig().save_pretrained(repository / "snapshots" / commit)
        (repository / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    assert model_fingerprint("someone/model", None) == commits["main"]
    assert model_fingerprint("someone/model", "refs/pr/1") == commits["refs/pr/1"]
    assert model_fingerprint("someone/model", commits["main"]) == commits["main"]
    with pytest.raises(UserError, match="model someone/another: can't be loaded"):
        model_fingerprint("someone/another", None)
