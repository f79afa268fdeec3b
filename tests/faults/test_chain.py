"""A short, fixed chain of faults. `make soak` runs seeded ones (`soak.py`)."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from helpers.buckets import bucket_for
from helpers.chain import Chain, write_data, write_yaml
from helpers.chain_faults import damaged_checkpoint, kill_loader, kill_rank, terminate, two_starts
from helpers.s3_proxy import Proxy
from soak import run_chain, train_reference


def test_a_run_that_meets_five_faults_is_the_same_run(s3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path / "data")
    reference = train_reference(tmp_path, "ddp")
    port = urlsplit(os.environ["S3_ENDPOINT_URL"]).port
    assert port is not None
    proxy = Proxy(port, 0.0, seed=1, stall_seconds=1, stalls=2)
    monkeypatch.setenv("S3_ENDPOINT_URL", proxy.address)
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    place = f"s3://{bucket_for(s3, 'chain')}/run"
    chain = Chain(write_yaml(tmp_path / "chain.yaml", tmp_path / "data", "ddp", place), place, "ddp", proxy, "3")
    try:
        run_chain(chain, [two_starts, terminate, kill_rank, damaged_checkpoint, kill_loader], reference, "chain")
    finally:
        proxy.close()
