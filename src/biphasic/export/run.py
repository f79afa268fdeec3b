"""Write a checkpoint, or the initial weights of a run, as a folder that other libraries load."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from biphasic.checkpointing.fetch import local_checkpoint
from biphasic.config.load import load_job
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.tokenizer import load_tokenizer
from biphasic.export.card import pretrained_card, untrained_card
from biphasic.export.formats import Format, choose_format
from biphasic.export.write import require_free, write_folder
from biphasic.initial_model import build_language_model
from biphasic.model.checkpoint import read_record, read_weights
from biphasic.model.hf_config import hf_config_from_json
from biphasic.model.pooling import SentenceSettings
from biphasic.model.text_tokenizer import TextTokenizer, trained_text_tokenizer

Precision = Literal["fp32", "bf16"]


def export_checkpoint(
    checkpoint: str,
    out: Path,
    *,
    name: str | None = None,
    dtype: Precision = "fp32",
    force: bool = False,
    source: Mapping[str, Any] | None = None,
) -> None:
    """Export a run's checkpoint, or the newest one in a run's checkpoint folder, local or in a bucket.

    `name` is the model's name on its card, `dtype` that of the weights on disk. `force` replaces an earlier export in
    `out`. `source` is as for `write_folder`. Raises a UserError if `out` is not free, or the checkpoint can't be read
    or exported.
    """
    require_free(out, force)
    # Files from a bucket are downloaded beside `out`. After SIGKILL the next export reuses those that are undamaged.
    downloads = out.resolve().with_name(f".{out.name}.download")
    try:
        local = local_checkpoint(checkpoint, downloads)
        record = read_record(local)
        text_tokenizer = trained_text_tokenizer(record)
        fmt = choose_format(hf_config_from_json(record["backbone"]), text_tokenizer.tokenizer)
        card = pretrained_card(record, name, family=fmt.family, has_code=bool(fmt.files))
        options: dict[str, Any] = {"source": source, "origin": f"checkpoint {local}"}
        _write(fmt, read_weights(local), text_tokenizer, out, card, dtype, force, **options)
    finally:
        shutil.rmtree(downloads, ignore_errors=True)


def export_initial(
    file: str, out: Path, overrides: list[str] | None = None, *, dtype: Precision = "fp32", force: bool = False
) -> None:
    """Export the initial weights of a pretraining YAML, with `overrides` (`key=value`), as `export_checkpoint` does."""
    require_free(out, force)
    config = load_job(PretrainConfig, file, overrides)
    tokenizer = load_tokenizer(config.tokenizer)
    model = build_language_model(config.model, config.longest_row, config.seed, tokenizer)
    fmt = choose_format(model.config, tokenizer)
    card = untrained_card(config.model_dump(mode="json"), family=fmt.family, has_code=bool(fmt.files))
    _write(fmt, model.state_dict(), TextTokenizer(tokenizer, config.longest_row), out, card, dtype, force)


def _write(
    fmt: Format,
    weights: Mapping[str, Tensor],
    text_tokenizer: TextTokenizer,
    out: Path,
    card: str,
    dtype: Precision,
    force: bool,
    **options: Any,
) -> None:
    options |= {"dtype": torch.bfloat16 if dtype == "bf16" else torch.float32, "force": force}
    options["keep_special_tokens"] = bool(text_tokenizer.prefix or text_tokenizer.suffix)
    settings = SentenceSettings(max_length=text_tokenizer.max_length)
    count = write_folder(fmt, "ForMaskedLM", weights, text_tokenizer.tokenizer, out, card, settings, **options)
    print(f"{out}: {count:,} parameters in {dtype}, {fmt.config.model_type} format")
