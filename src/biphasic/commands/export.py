"""Write a checkpoint as a folder that other libraries load: biphasic export CHECKPOINT OUT

Further steps for an exported folder: biphasic export FOLDER --onnx, --results, --push.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from biphasic.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic export`."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run's checkpoint, local or in a bucket: a .pt file, the folder of a sharded one, or a run's checkpoint "
        "folder, for its newest; or an exported folder, without OUT",
    )
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="the folder to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with --initial: replace a value of the YAML")
    export = parser.add_argument_group("the export")
    export.add_argument("--initial", action="store_true", help="CHECKPOINT is a pretraining YAML: its initial weights")
    export.add_argument("--name", help="the model's name on its card")
    export.add_argument("--dtype", choices=("fp32", "bf16"), help="of the weights on disk; default: fp32")
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


def run(options: argparse.Namespace) -> int:
    """Export, take the further steps, and return the exit status."""
    _check(options)
    if options.out is not None:
        from biphasic.export.run import export_checkpoint, export_initial

        export = partial(export_initial, overrides=options.overrides) if options.initial else export_checkpoint
        export(options.checkpoint, options.out, name=options.name, dtype=options.dtype or "fp32", force=options.force)
    _further_steps(options, options.out or Path(options.checkpoint))
    if options.out is not None and options.push is None:
        from biphasic.commands.next_step import after_export

        print(after_export(options.out))
    return 0


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
        for name in ("initial", "name", "dtype", "force"):
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
