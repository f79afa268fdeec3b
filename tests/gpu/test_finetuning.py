"""On a GPU: each family trains, in bf16 too, with the CPU's losses."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from biphasic.finetuning.trial import run_trial
from helpers.tiny import write_tokenizer
from helpers.toy_sets import config_of, make_sets, write_encoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_tokenizer(folder / "tokenizer")
    make_sets(folder)
    write_encoder(folder / "start", folder / "tokenizer")
    return folder


ON_CPU = """
import json, pickle, sys
from biphasic.finetuning.trial import run_trial
trial = run_trial(pickle.load(sys.stdin.buffer))
print(json.dumps([trial.about["loss"], trial.results[0].test]))
"""


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("name", ["sst2", "conll2003", "squad_v2", "msmarco"])
def test_families(name: str, precision: str, root: Path, tmp_path: Path) -> None:
    config = config_of(name, root / "tasks", root / "start", tmp_path, max_duration="5ba", precision=precision)
    there = run_trial(config)
    # In another process, because this one's process group is NCCL's.
    done = subprocess.run(
        [sys.executable, "-c", ON_CPU], capture_output=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        input=pickle.dumps(config.model_copy(update={"precision": "fp32"})),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    loss, score = json.loads(done.stdout.splitlines()[-1])
    assert there.about["loss"] == pytest.approx(loss, rel=1e-3 if precision == "fp32" else 2e-2)
    assert there.results[0].test == pytest.approx(score, abs=0.1)
