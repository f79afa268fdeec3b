"""No credential is written or printed."""

import os
from pathlib import Path
from typing import Any

import pytest

from biphasic.errors import ConfigError
from conftest import Write
from helpers import warm
from helpers.buckets import bucket_for, client, upload
from helpers.s3_server import SECRET
from helpers.tiny import config_of

CANARIES = {
    "WANDB_API_KEY": "canary-wandb-0123456789abcdef0123456789abcdef",
    "HF_TOKEN": "hf_canaryCanaryCanaryCanaryCanary",
    "MLFLOW_TRACKING_PASSWORD": "canary-mlflow-password",
    "AWS_SESSION_TOKEN": "canary-session-token",
    "AZURE_ACCOUNT_ACCESS_KEY": "canary-azure-key",
}


def test_credentials_are_in_no_file_and_no_output(s3: Path, write_yaml: Write, tmp_path: Path) -> None:
    bucket = bucket_for(s3, "secrets")
    remote = upload(write_yaml("secret").parent / "data" / "train", bucket, "train")
    train = {"local": str(tmp_path / "cache"), "remote": remote}
    keys: dict[str, Any] = {"checkpoint__folder": f"s3://{bucket}/run", "checkpoint__interval": "4ba"}
    path = write_yaml("secret", **keys, logging__tensorboard=True, data__train=train)
    checkpoint = str(Path(config_of(path).output) / "secret" / "checkpoints" / "ba13-rank0.pt")
    wrong_secret = {"AWS_SECRET_ACCESS_KEY": "canary-wrong-secret"}
    # A run, a run that can't sign in, a resumed run, its export, its report, and a preflight that can't sign in.
    steps: list[tuple[str, list[str], dict[str, str], int]] = [
        ("main", [str(path)], {}, 0),
        ("main", [str(path), "run_name=other"], wrong_secret, 2),
        ("main", [str(path), "max_duration=13ba", "checkpoint.resume_overrides=[schedule]"], {}, 0),
        ("biphasic", ["export", checkpoint, str(tmp_path / "export")], {}, 0),
        ("biphasic", ["runs", f"s3://{bucket}/run"], {}, 0),
        ("biphasic", ["preflight", str(path)], wrong_secret, 2),
    ]
    environment = {**os.environ, **CANARIES, "CUDA_VISIBLE_DEVICES": ""}
    # The imports see the credentials, too.
    server, outputs = warm.Server(environment), []
    for module, arguments, changes, status in steps:
        run = server.start(arguments, 1, {**environment, **changes}, module=module).wait()
        assert run.returncode == status, (module, arguments, run.stdout[-2000:], run.stderr[-3000:])
        outputs.append(run.stdout + run.stderr)
    planted = [value.encode() for value in (*CANARIES.values(), "canary-wrong-secret", SECRET)]
    objects = {item["Key"]: client().get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
               for item in client().list_objects_v2(Bucket=bucket)["Contents"]}  # fmt: skip
    files = {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and "data" not in file.parts}
    assert len(files) > 8 and len(objects) > 8
    for where, content in {
        **files,
        **objects,
        **{f"output {n}": text.encode() for n, text in enumerate(outputs)},
    }.items():
        for canary in planted:
            assert canary not in content, (where, canary)


def test_a_password_in_an_address_is_refused(write_yaml: Write) -> None:
    keys: dict[str, Any] = {"start_from": "https://me:canary@host/x"}
    with pytest.raises(ConfigError) as raised:
        config_of(write_yaml("password", **keys, checkpoint__folder="s3://key:canary@bucket/x"))
    assert "start_from" in str(raised.value) and "checkpoint.folder" in str(raised.value)
    assert "needs an address without user and password" in str(raised.value)
    assert "canary" not in str(raised.value)
