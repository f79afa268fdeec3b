"""`python -m biphasic.export CHECKPOINT OUT`: write a checkpoint as a folder that other libraries load.

`python -m biphasic.export FOLDER --onnx`, `--results`, `--push`: further steps for an exported folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from biphasic.errors import ConfigError, UserError


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 after success, 2 after a user error."""
    args = _parser().parse_intermixed_args(arguments)
    try:
        _check(args)
        if args.out is not None:
            _export(args)
        _further_steps(args, args.out or Path(args.checkpoint))
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m biphasic.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint",
        help="a run's checkpoint, local or in a bucket: a .pt file, the folder of a sharded one, or a run's checkpoint "
        "folder, for its newest; or an exported folder, without OUT",
    )
    parser.add_argument("out", type=Path, nargs="?", help="the folder to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with --initial: replace a value of the YAML")
    export = parser.add_argument_group("the export")
    export.add_argument("--initial", action="store_true", help="CHECKPOINT is a pretraining YAML: its initial weights")
    export.add_argument("--name", help="the model's name on its card")
    export.add_argument("--dtype", choices=("fp32", "bf16"), help="of the weights on disk; default: fp32")
    export.add_argument("--tokenizer", help="folder or hub id; default: the run's")
    export.add_argument("--force", action="store_true", help="replace an earlier export in OUT")
    steps = parser.add_argument_group("in the exported folder")
    steps.add_argument("--onnx", action="store_true", help="write onnx/model.onnx, and compare it with the model")
    steps.add_argument("--results", type=Path, metavar="FOLDER", help="put mteb's results onto the card")
    steps.add_argument("--results-of", metavar="MODEL", help="the model, if FOLDER has results of several")
    steps.add_argument("--license", metavar="ID", help="of the weights, on the card, e.g. apache-2.0")
    steps.add_argument("--language", metavar="CODE", action="append", help="of the training text, e.g. en; repeatable")
    push = parser.add_argument_group("to the hub")
    push.add_argument("--push", metavar="ORG/NAME", help="upload the folder there; the token is HF_TOKEN's")
    push.add_argument("--revision", metavar="BRANCH", help="to a branch, created if it is missing; default: main")
    push.add_argument("--private", action="store_true", help="create a private repository, if it is new")
    push.add_argument("--dry-run", action="store_true", help="print what would be uploaded, without any request")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raise a UserError for options that can't work, before anything is loaded or written."""
    if args.overrides and not args.initial:
        raise UserError(f"{args.overrides[0]}: values can be replaced with --initial only, which reads a YAML")
    if args.push is None and (args.revision or args.private or args.dry_run):
        raise UserError("--revision, --private and --dry-run belong to --push ORG/NAME, which is missing")
    if args.results_of and not args.results:
        raise UserError("--results-of belongs to --results FOLDER, which is missing")
    if args.out is None:
        from biphasic.export.folder import EXPORT_FILE, require_export

        folder = Path(args.checkpoint)
        steps = args.onnx or args.results or args.license or args.language or args.push
        if not steps and not (folder / EXPORT_FILE).is_file():
            raise UserError(f"{folder}: the folder to write, OUT, is missing")
        require_export(folder)
        for name in ("initial", "name", "dtype", "tokenizer", "force"):
            if getattr(args, name):
                raise UserError(f"--{name} belongs to an export, and {folder} is one: give a checkpoint and OUT")
        if not steps:
            raise UserError(f"{folder} is an export: add --onnx, --results, --license, --language or --push")
    if args.results is not None:
        from biphasic.export.results import read_results

        read_results(args.results, args.results_of)
    if args.push is not None:
        from biphasic.export.push import require_repo, require_token

        require_repo(args.push)
        if not args.dry_run:
            require_token()
    if args.onnx:
        from biphasic.export.onnx import require_onnx

        require_onnx()


def _export(args: argparse.Namespace) -> None:
    from biphasic.export.write import require_free

    require_free(args.out, args.force)
    # Files from a bucket are downloaded beside `out`. If an export is killed, the next one reuses its undamaged downloads.
    downloads = args.out.resolve().with_name(f".{args.out.name}.download")
    try:
        _write(args, downloads)
    finally:
        shutil.rmtree(downloads, ignore_errors=True)


def _write(args: argparse.Namespace, downloads: Path) -> None:
    import torch
    import yaml

    from biphasic.checkpointing.resume import local_checkpoint
    from biphasic.config.load import load
    from biphasic.config.pretrain import PretrainConfig
    from biphasic.data.tokenizer import load_tokenizer
    from biphasic.export.card import pretrained_card, untrained_card
    from biphasic.export.weights import Weights
    from biphasic.export.write import choose_format, write_language_model
    from biphasic.model.backbone import build_language_model, hf_config_from_json
    from biphasic.model.checkpoint import read_record

    if args.initial:
        config = load(args.checkpoint, args.overrides)
        if not isinstance(config, PretrainConfig):
            raise UserError(f"{args.checkpoint}: expected a job: pretrain YAML")
        tokenizer = load_tokenizer(args.tokenizer or config.tokenizer)
        model = build_language_model(config.model, config.data.sequence_length, config.seed, tokenizer.vocab_size)
        fmt, weights = choose_format(model.config, tokenizer), Weights.in_memory(model.state_dict())
        card = untrained_card(config.model_dump(mode="json"), args.name, remote_code=bool(fmt.files))
    else:
        checkpoint = local_checkpoint(args.checkpoint, downloads)
        record = read_record(checkpoint)
        tokenizer = load_tokenizer(args.tokenizer or yaml.safe_load(record["config"])["tokenizer"])
        fmt = choose_format(hf_config_from_json(record["backbone"]), tokenizer)
        weights = Weights.from_checkpoint(checkpoint)
        card = pretrained_card(record, args.name, remote_code=bool(fmt.files))
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    count = write_language_model(fmt, weights, tokenizer, args.out, card, dtype=dtype, force=args.force)
    print(f"{args.out}: {count:,} parameters in {args.dtype or 'fp32'}, {fmt.name} format")


def _further_steps(args: argparse.Namespace, folder: Path) -> None:
    if args.license or args.language or args.results is not None:
        from biphasic.export.folder import CARD_FILE, read_card, write_card
        from biphasic.export.results import add_results

        card = read_card(folder)
        data: Any = card.data
        data.license = args.license or data.license
        data.language = args.language or data.language
        if args.results is not None:
            add_results(card, args.results, args.results_of)
        write_card(folder, card)
        print(f"{folder / CARD_FILE}: updated")
    if args.onnx:
        from biphasic.export.onnx import export_onnx

        export_onnx(folder)
    if args.push is not None:
        from biphasic.export.push import push

        push(folder, args.push, revision=args.revision, private=args.private, dry_run=args.dry_run)


if __name__ == "__main__":
    sys.exit(main())
