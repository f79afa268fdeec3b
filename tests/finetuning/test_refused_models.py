"""Models that can't be used are refused, with the reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BloomConfig, BloomModel, Qwen3ForCausalLM

from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.load import load
from biphasic.errors import UserError
from biphasic.evaluation.plan import plan_evaluation
from biphasic.finetuning.run import run
from biphasic.finetuning.trial import check_trial
from biphasic.model.backbone import load_language_model
from biphasic.model.encoder import load_embedder, load_encoder
from biphasic.model.probe import is_bidirectional
from biphasic.model.text_tokenizer import load_text_tokenizer
from helpers.families import bert, qwen3
from helpers.tiny import ROOT
from helpers.toy_sets import config_of


def test_a_decoder_that_cannot_be_written_is_refused_before_training(tmp_path: Path, toy: Path) -> None:
    """EuroBERT's configuration can scale positions; exports don't."""
    folder = tmp_path / "scaled"
    shutil.copytree(toy / "start", folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="save_model=false trains and scores"):
        run(config_of("sst2", toy / "tasks", folder, tmp_path, save_model=True, max_duration="1ba"))


def test_a_causal_model_is_refused(tmp_path: Path) -> None:
    """A folder whose own code is a decoder."""
    torch.manual_seed(0)
    causal = Qwen3ForCausalLM.from_pretrained(qwen3(tmp_path / "qwen3"))
    assert not is_bidirectional(causal.model.eval())
    folder = tmp_path / "own"
    shutil.copytree(tmp_path / "qwen3", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import Qwen3Config, Qwen3Model\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n"
        "class OwnModel(Qwen3Model):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(UserError, match="don't depend on later tokens"):
        load_encoder(str(folder), trust_remote_code=True)


def test_a_decoder_s_own_embeddings_are_refused(tmp_path: Path) -> None:
    """They are those of causal attention. To fine-tune it as an encoder is another thing."""
    folder = qwen3(tmp_path / "qwen3")
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for at, (path, kind) in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert load_encoder(str(folder)).pooling.mode == "lasttoken"
    with pytest.raises(UserError, match=r"qwen3: embeds texts with causal attention, which isn't supported"):
        load_embedder(str(folder))


def test_a_family_without_a_maximum_length_is_refused(tmp_path: Path) -> None:
    BloomModel(BloomConfig(vocab_size=65, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"bloom isn't supported: it has no max_position_embeddings"):
        load_text_tokenizer(str(tmp_path))


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    folder = bert(tmp_path / "bert")
    config = json.loads((folder / "config.json").read_text())
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**{**config, "vocab_size": 40})).save_pretrained(folder)
    with pytest.raises(UserError, match=r"its tokenizer has 65 tokens, its embedding 40"):
        load_encoder(str(folder))
    torch.manual_seed(0)
    incomplete = bert(tmp_path / "incomplete")
    weights = load_file(incomplete / "model.safetensors")
    weights.pop("bert.encoder.layer.1.output.dense.weight")
    save_file(weights, incomplete / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 weights, e\.g\. encoder\.layer\.1\.output\.dense\.weight"):
        load_encoder(str(incomplete))
    weights["bert.encoder.layer.1.output.dense.weight"] = torch.full((32, 48), torch.nan)
    save_file(weights, incomplete / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model .*incomplete: can't be used as an encoder \(the output has NaN or Inf\)"):
        load_encoder(str(incomplete))


def test_weights_that_are_not_there_are_refused_by_plans_and_starts_alike(tmp_path: Path, toy: Path) -> None:
    """tests/model/test_stored_weights.py has the other folders."""
    folder = shutil.copytree(toy / "start", tmp_path / "model")
    finetuning = config_of("sst2", toy / "tasks", folder, tmp_path)
    evaluation = load(ROOT / "yamls" / "evaluate" / "quick.yaml", [f"model.path={folder}"])
    assert isinstance(evaluation, EvaluateConfig)
    assert not check_trial(finetuning) and not plan_evaluation(evaluation).problems
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    [problem] = plan_evaluation(evaluation).problems
    assert problem.endswith("fetch them with git lfs pull")
    for refuse in (lambda: check_trial(finetuning), lambda: load_encoder(str(folder))):
        with pytest.raises(UserError) as refused:
            refuse()
        assert str(refused.value) == problem


@pytest.mark.parametrize("read", [load_encoder, load_language_model])
def test_a_bad_configuration_is_refused_in_one_line(tmp_path: Path, read: Callable[[str], Any]) -> None:
    folder = qwen3(tmp_path / "qwen3")
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": "wide"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"can't be loaded .*field 'hidden_size'.*value: 'wide'") as caught:
        read(str(folder))
    assert "\n" not in str(caught.value)
