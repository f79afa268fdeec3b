"""W&B and MLflow without a server, for tests."""

from pathlib import Path

import pytest


def keep_local(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let W&B and MLflow write to a folder, without a server."""
    import wandb
    from mlflow import set_tracking_uri
    from mlflow.tracking import fluent

    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    # What an earlier test in this process has set.
    wandb.teardown()
    monkeypatch.setattr(fluent, "_active_experiment_id", None)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    set_tracking_uri(f"file://{folder}/mlflow")
