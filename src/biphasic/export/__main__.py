"""`python -m biphasic.export CHECKPOINT OUT`: a checkpoint to a folder that transformers and sentence-transformers load."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from biphasic.config.errors import ConfigError, UserError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 written, 2 something given can't be used."""
    parser = argparse.ArgumentParser(prog="python -m biphasic.export", description=__doc__)
    parser.add_argument("checkpoint", help="a run's checkpoint: a .pt file, or the folder of a sharded one")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--initial", action="store_true", help="CHECKPOINT is a pretraining YAML: its initial weights")
    parser.add_argument("--name", help="the model's name on its card")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights on disk")
    parser.add_argument("--tokenizer", help="folder or hub id; default: the one that the run names")
    parser.add_argument("--force", action="store_true", help="replace an earlier export in OUT")
    given = parser.parse_args(arguments)
    try:
        _export(given)
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _export(given: argparse.Namespace) -> None:
    from biphasic.export.write import refuse_taken

    refuse_taken(given.out, given.force)
    # Imported here: `--help` and a taken folder are answered at once.
    import torch
    import yaml

    from biphasic.config.load import load
    from biphasic.config.schema import PretrainConfig
    from biphasic.data.tokenizer import load_tokenizer
    from biphasic.export.card import pretrained_card, untrained_card
    from biphasic.export.write import export_language_model
    from biphasic.model.backbone import build, load_language_model
    from biphasic.model.checkpoint import read_checkpoint

    if given.initial:
        config = load(given.checkpoint)
        if not isinstance(config, PretrainConfig):
            raise UserError(f"{given.checkpoint}: expected a job: pretrain YAML")
        tokenizer = load_tokenizer(given.tokenizer or config.tokenizer)
        model = build(config.model, config.data.sequence_length, config.seed, tokenizer.vocab_size)
        card = untrained_card(config.model_dump(mode="json"), given.name)
    else:
        record = read_checkpoint(given.checkpoint).record
        tokenizer = load_tokenizer(given.tokenizer or yaml.safe_load(record["config"])["tokenizer"])
        model = load_language_model(given.checkpoint)
        card = pretrained_card(record, given.name)
    dtype = torch.float32 if given.dtype == "fp32" else torch.bfloat16
    export_language_model(model, tokenizer, given.out, card, dtype=dtype, force=given.force)
    print(f"{given.out}: {sum(p.numel() for p in model.parameters()):,} parameters in {given.dtype}, eurobert format")


if __name__ == "__main__":
    sys.exit(main())
