"""A model's embedding and head are rebuilt for another tokenizer: which old vectors each new row is the mean of."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from biphasic.config.load import load
from biphasic.config.model import ModelConfig
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.errors import ConfigError, UserError
from biphasic.initial_model import build_language_model
from biphasic.model.backbone import load_language_model
from biphasic.model.language_model import LanguageModel
from conftest import Write
from helpers.decoders import saved_decoder
from helpers.texts import VERSE, write_kind
from helpers.tiny import WORDS, config_of, train

OTHER = f"{VERSE[: len(VERSE) // 2]} tokenizers learned other models' embeddings; reader, readings, texts, rowing lefty"
PADDED = 7
"""Rows of the old embedding that no token has."""


def make(folder: Path, old_kind: str, new_kind: str, family: str = "llama") -> tuple[Tokenizer, Tokenizer, ModelConfig]:
    """Write a model with a tokenizer, and a tokenizer of another text, with other names for its special tokens."""
    old = load_tokenizer(str(write_kind(folder / "model", old_kind, names="<{}>")))
    new = load_tokenizer(str(write_kind(folder / "new", new_kind, OTHER)))
    saved_decoder(family, folder / "model", vocab_size=old.vocab_size + PADDED, bos_token_id=1, eos_token_id=old.eos_id)
    return old, new, ModelConfig(init_from=str(folder / "model"), new_vocabulary="overlap")


def rebuilt(config: ModelConfig, new: Tokenizer) -> tuple[dict[str, Tensor], LanguageModel]:
    old_model = load_language_model(str(config.init_from))
    return old_model.state_dict(), build_language_model(config, 32, 0, new)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_byte_level_to_byte_level(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Llama's head is untied, Gemma's is tied. Every row against the old tokenizer's own encoding of the decoded token."""
    old, new, config = make(tmp_path, "byte-level", "byte-level", family)
    before, model = rebuilt(config, new)
    after = model.state_dict()
    counts = [0, 0]
    for name in ("backbone.embed_tokens.weight", "lm_head.weight"):
        weight = before[name]
        assert after[name].shape[0] == new.vocab_size == model.config.vocab_size
        for token in range(4):  # unk, pad, eos, mask, under other names
            assert torch.equal(after[name][token], weight[token])
        for token in range(4, new.vocab_size):
            text = str(new.tokenizer.id_to_token(token))
            if (same := old.tokenizer.token_to_id(text)) is not None:
                assert torch.equal(after[name][token], weight[same])
                counts[0] += 1
            else:
                pieces = old.encode([new.tokenizer.decode([token])])[0]
                assert len(pieces) > 1
                torch.testing.assert_close(after[name][token], weight[pieces].mean(0))
                counts[1] += 1
    assert min(counts) > 50
    keep, means = counts[0] // 2 + 4, counts[1] // 2
    assert f"{keep} tokens keep their vectors, {means} have the mean" in capfd.readouterr().out
    assert (model.lm_head.weight is model.backbone.get_input_embeddings().weight) == (family == "gemma2")
    assert (model.config.eos_token_id, model.config.bos_token_id) == (new.eos_id, None)
    unchanged = [name for name in before if "embed_tokens" not in name and "lm_head" not in name]
    assert all(torch.equal(before[name], after[name]) for name in unchanged)


@pytest.mark.parametrize(
    ("old_kind", "first", "inner"),
    [("metaspace", "▁{}", "{}"), ("wordpiece", "{}", "##{}"), ("byte-level", "Ġ{}", "{}")],
)
@pytest.mark.parametrize("new_kind", ["byte-level", "wordpiece", "metaspace"])
def test_tokens_of_other_kinds_are_compared_by_their_text(
    old_kind: str, first: str, inner: str, new_kind: str, tmp_path: Path
) -> None:
    old, new, config = make(tmp_path, old_kind, new_kind)
    before, model = rebuilt(config, new)
    weight, now = before["lm_head.weight"], model.lm_head.weight
    new_first, new_inner = {"byte-level": ("Ġ{}", "{}"), "wordpiece": ("{}", "##{}"), "metaspace": ("▁{}", "{}")}[new_kind]
    old_id, new_id = old.tokenizer.token_to_id, new.tokenizer.token_to_id
    shared = 0
    for form, new_form in ((first, new_first), (inner, new_inner)):
        for part in {*VERSE.split(), *"abcdefghilmnopqrstuwxy", "le", "ext", "tion"}:
            if (token := new_id(new_form.format(part))) is not None and (same := old_id(form.format(part))) is not None:
                assert torch.equal(now[token], weight[same])
                shared += 1
    assert shared > 25


def test_tokens_without_pieces_get_the_mean_of_all_tokens(tmp_path: Path) -> None:
    old, new, config = make(tmp_path, "wordpiece", "byte-level")
    before, model = rebuilt(config, new)
    expected = before["lm_head.weight"][: old.vocab_size].mean(0)  # without the padded rows
    byte = new.tokenizer.token_to_id("æ")  # the first byte of 漢
    assert byte is not None
    torch.testing.assert_close(model.lm_head.weight[byte], expected)


def test_a_bias_of_the_head_is_rebuilt_too(tmp_path: Path) -> None:
    saved_decoder("llama", tmp_path)
    model = load_language_model(str(tmp_path))
    model.lm_head.bias = torch.nn.Parameter(torch.arange(float(WORDS)))
    model.resize_token_embeddings(WORDS + 2)
    assert torch.equal(model.lm_head.bias[:WORDS], torch.arange(float(WORDS)))
    assert model.lm_head.bias[WORDS:].tolist() == [(WORDS - 1) / 2] * 2
    model.map_vocabulary(lambda rows: rows.flip(0))
    assert model.lm_head.bias[-1] == 0


def test_what_is_refused(tmp_path: Path) -> None:
    old, new, config = make(tmp_path, "byte-level", "byte-level")
    without = config.model_copy(update={"new_vocabulary": None})
    with pytest.raises(UserError, match=r"is not that of model\.init_from, .* or set model\.new_vocabulary=overlap"):
        build_language_model(without, 32, 0, new)
    with pytest.raises(UserError, match=r"already has the tokenizer .*: remove the key"):
        build_language_model(config, 32, 0, old)
    build_language_model(without, 32, 0, old)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"model\.new_vocabulary: needs the tokenizer of .*: has no tokenizer\.json"):
        build_language_model(config, 32, 0, new)
    build_language_model(without, 32, 0, new)  # can't be compared


def test_added_tokens_and_another_name_of_a_special_token_need_no_new_vocabulary(tmp_path: Path) -> None:
    _, _, config = make(tmp_path, "byte-level", "byte-level")
    text = (tmp_path / "model" / "tokenizer.json").read_text().replace("<mask>", "<blank>")
    content = json.loads(text)
    size = len(content["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": size, "content": "a further word", **flags})
    folder = tmp_path / "changed"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = (tmp_path / "model" / "tokenizer_config.json").read_text().replace("<mask>", "<blank>")
    (folder / "tokenizer_config.json").write_text(settings)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.vocab_size == size + 1
    before, model = rebuilt(config.model_copy(update={"new_vocabulary": None}), tokenizer)
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])


def test_a_model_with_fewer_rows_than_tokens_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as one beside whose files another model's tokenizer lies."""
    tokenizer = load_tokenizer(str(write_kind(tmp_path / "model", "byte-level")))
    for rows, grows in ((50, True), (tokenizer.vocab_size, False), (tokenizer.vocab_size + PADDED, False)):
        saved_decoder("llama", tmp_path / "model", vocab_size=rows)
        build_language_model(ModelConfig(init_from=str(tmp_path / "model")), 32, 0, tokenizer)
        said = f"model.init_from: its 50 tokens become {tokenizer.vocab_size}, the new ones with the mean of all vectors\n"
        assert (said in capsys.readouterr().out) == grows


def test_a_checkpoint_s_tokenizer_is_the_one_of_its_run(write_yaml: Write, tmp_path: Path) -> None:
    path = write_yaml(max_duration="1ba", objective__phases=[{"name": "clm"}], schedule={})
    checkpoint = str(train(config_of(path)) / "checkpoints" / "ba1-rank0.pt")
    new = load_tokenizer(str(write_kind(tmp_path / "new", "byte-level", OTHER)))
    with pytest.raises(UserError, match=r"set model\.new_vocabulary=overlap"):
        build_language_model(ModelConfig(init_from=checkpoint), 32, 0, new)
    model = build_language_model(ModelConfig(init_from=checkpoint, new_vocabulary="overlap"), 32, 0, new)
    assert torch.equal(model.lm_head.weight[new.mask_id], load_language_model(checkpoint).lm_head.weight[3])


def test_it_needs_a_model_to_start_from(write_yaml: Write) -> None:
    with pytest.raises(ConfigError, match=r"model\.new_vocabulary: has no effect without model\.init_from"):
        load(write_yaml(), ["model.new_vocabulary=overlap"])


@pytest.mark.parametrize("change", ["normalizer", "pre_tokenizer", "merges"])
def test_the_same_tokens_from_other_texts_are_another_tokenizer(change: str, tmp_path: Path) -> None:
    old, _, config = make(tmp_path, "byte-level", "byte-level")
    content = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    if change == "normalizer":
        content["normalizer"] = {"type": "Lowercase"}
    elif change == "pre_tokenizer":
        content["pre_tokenizer"]["add_prefix_space"] = True
    else:
        content["model"]["merges"] = content["model"]["merges"][::-1]
    folder = tmp_path / "changed"
    shutil.copytree(tmp_path / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    new = load_tokenizer(str(folder))
    assert new.tokenizer.get_vocab() == old.tokenizer.get_vocab()
    without = config.model_copy(update={"new_vocabulary": None})
    with pytest.raises(UserError, match=r"is not that of model\.init_from, .* \(of '.*' it makes \[.*, and the model's \["):
        build_language_model(without, 32, 0, new)
    build_language_model(config, 32, 0, new)
