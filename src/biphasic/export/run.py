"""Write a checkpoint, or the initial weights of a run, as a folder that other libraries load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from biphasic.checkpointing.fetch import local_checkpoint
from biphasic.config.load import load_job
from biphasic.config.phase_inputs import longest_row
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.export.card import pretrained_card, untrained_card
from biphasic.export.formats import Format, choose_format
from biphasic.export.write import Weights, require_free, write_folder
from biphasic.model.backbone import build_language_model, hf_config_from_json
from biphasic.model.checkpoint import read_record
from biphasic.model.encoder import trained_tokenizer
from biphasic.model.pooling import SentenceSettings

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

    `name` is the model's name on its card, `dtype` that of the weights on disk. `force` replaces an earlier export in `out`.
    `source` is as for `write_folder`.

    Raises:
        UserError: `out` is not free, or the checkpoint can't be read or exported.
    """
    require_free(out, force)
    # Files from a bucket are downloaded beside `out`. After SIGKILL the next export reuses those that are undamaged.
    downloads = out.resolve().with_name(f".{out.name}.download")
    try:
        local = local_checkpoint(checkpoint, downloads)
        record = read_record(local)
        tokenizer = trained_tokenizer(record)
        fmt = choose_format(hf_config_from_json(record["backbone"]), tokenizer)
        card = pretrained_card(record, name, family=fmt.family, has_code=bool(fmt.files))
        length, has_bos = longest_row(yaml.safe_load(record["config"])), bool(record["data"].get("add_bos"))
        _write(fmt, Weights.from_checkpoint(local), tokenizer, out, card, dtype, force, length, has_bos, source)
    finally:
        shutil.rmtree(downloads, ignore_errors=True)


def export_initial(
    file: str,
    out: Path,
    *,
    overrides: list[str] | None = None,
    name: str | None = None,
    dtype: Precision = "fp32",
    force: bool = False,
) -> None:
    """Export the initial weights of a pretraining YAML, with `overrides` (`key=value`), as `export_checkpoint` does."""
    require_free(out, force)
    config = load_job(PretrainConfig, file, overrides)
    tokenizer = load_tokenizer(config.tokenizer)
    model = build_language_model(config.model, config.longest_row, config.seed, tokenizer)
    fmt = choose_format(model.config, tokenizer)
    card = untrained_card(config.model_dump(mode="json"), name, family=fmt.family, has_code=bool(fmt.files))
    _write(fmt, Weights.in_memory(model.state_dict()), tokenizer, out, card, dtype, force, config.longest_row)


def _write(
    fmt: Format,
    weights: Weights,
    tokenizer: Tokenizer,
    out: Path,
    card: str,
    dtype: Precision,
    force: bool,
    length: int,
    has_bos: bool = False,
    source: Mapping[str, Any] | None = None,
) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16 if dtype == "bf16" else torch.float32, "force": force}
    options |= {"settings": SentenceSettings(max_length=length), "keep_special_tokens": has_bos, "source": source}
    count = write_folder(fmt, "ForMaskedLM", weights, tokenizer, out, card, **options)
    print(f"{out}: {count:,} parameters in {dtype}, {fmt.config.model_type} format")
