"""The example of a new family of tasks in CONTRIBUTING.md trains and is scored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.nn.functional as F

from biphasic.config.finetune import _ScoredConfig
from biphasic.downstream.array_cache import Ragged
from biphasic.downstream.writer import SCHEMAS
from biphasic.finetuning.batches import derive_seed
from biphasic.finetuning.task import PredictionTask, TrainedModel
from biphasic.finetuning.trainer import train
from biphasic.finetuning.trial import FAMILIES
from biphasic.model.encoder import load_encoder
from biphasic.model.heads import TextHead, initialize_head
from biphasic.model.pooling import mean_pool
from helpers.tiny import ROOT
from helpers.toy_sets import config_of


class RegressionConfig(_ScoredConfig):
    kind: str = "regression"
    metrics: list[str] = ["pearson"]


def test_the_example_learns(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema({"id": pa.string(), "text": pa.string(), "number": pa.float32()})
    monkeypatch.setitem(SCHEMAS, "regression", schema)
    code = re.search(r"```python\n(class Regression.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert code is not None
    names = {"PredictionTask": PredictionTask, "TextHead": TextHead, "Ragged": Ragged, "mean_pool": mean_pool, "np": np,
             "F": F}  # fmt: skip
    exec(code[1], names)
    monkeypatch.setitem(FAMILIES, "regression", names["Regression"])  # pyright: ignore[reportArgumentType]

    folder, generator = tmp_path / "numbers", np.random.default_rng(0)
    folder.mkdir()
    for split, count in (("train", 640), ("validation", 64), ("test", 64)):
        numbers = generator.integers(0, 4, count)
        texts = [" ".join(["w1"] * number + ["w2"] * (4 - number)) for number in numbers]
        rows = {"id": [str(at) for at in range(count)], "text": texts, "number": numbers.astype(np.float32)}
        pq.write_table(pa.table(rows, schema), folder / f"{split}.parquet")
    (folder / "task.json").write_text(json.dumps({"kind": "regression", "rows": {}}))

    base = config_of("sst2", toy / "tasks", toy / "start", tmp_path, max_duration="2ep")
    config = base.model_copy(update={"task": RegressionConfig(name="numbers", data=str(folder))})
    encoder = load_encoder(config.model.path)
    task = FAMILIES["regression"](config.task, encoder.text_tokenizer, config.cache)
    head = task.build_head(encoder.width)
    initialize_head(head, 0.02, derive_seed("head", 0))
    assert train(config, encoder, head, task)["steps"] == 40
    [result], _ = task.evaluate(TrainedModel(encoder, head, 4096, bf16=False))
    assert result.metric == "pearson"
    assert result.test is not None
    assert result.test > 0.9
