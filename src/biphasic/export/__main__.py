"""`python -m biphasic.export CHECKPOINT OUT`: a checkpoint to a folder that transformers and sentence-transformers load.

`python -m biphasic.export FOLDER --onnx`, `--results`, `--push`: more for a folder that was exported already.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from biphasic.config.errors import ConfigError, UserError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 written, 2 something given can't be used."""
    given = _parser().parse_args(arguments)
    try:
        _before(given)
        if given.out is not None:
            _export(given)
        _after(given, given.out or Path(given.checkpoint))
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
        help="a run's checkpoint, here or in a bucket: a .pt file, the folder of a sharded one, or the folder where a run "
        "saves, for its newest; or an exported folder, without OUT",
    )
    parser.add_argument("out", type=Path, nargs="?", help="the folder to write")
    export = parser.add_argument_group("the export")
    export.add_argument("--initial", action="store_true", help="CHECKPOINT is a pretraining YAML: its initial weights")
    export.add_argument("--name", help="the model's name on its card")
    export.add_argument("--dtype", choices=("fp32", "bf16"), help="of the weights on disk; default: fp32")
    export.add_argument("--tokenizer", help="folder or hub id; default: the one that the run names")
    export.add_argument("--force", action="store_true", help="replace an earlier export in OUT")
    more = parser.add_argument_group("in the exported folder")
    more.add_argument("--onnx", action="store_true", help="write onnx/model.onnx, and compare it with the model")
    more.add_argument("--results", type=Path, metavar="FOLDER", help="put mteb's results onto the card")
    more.add_argument("--results-of", metavar="MODEL", help="whose, where the folder has several models'")
    more.add_argument("--license", metavar="ID", help="of the weights, on the card, e.g. apache-2.0")
    more.add_argument(
        "--language", metavar="CODE", action="append", help="of the training text, e.g. en; may be repeated"
    )
    push = parser.add_argument_group("to the hub")
    push.add_argument("--push", metavar="ORG/NAME", help="send the folder there; the token is HF_TOKEN's")
    push.add_argument("--revision", metavar="BRANCH", help="to a branch, which is made if it is missing; default: main")
    push.add_argument("--private", action="store_true", help="make the repository a private one, if it is new")
    push.add_argument("--dry-run", action="store_true", help="say what would be sent, and contact nobody")
    return parser


def _before(given: argparse.Namespace) -> None:
    """Say what can't work before anything is loaded or written."""
    if given.push is None and (given.revision or given.private or given.dry_run):
        raise UserError("--revision, --private and --dry-run belong to --push ORG/NAME, which is missing")
    if given.results_of and not given.results:
        raise UserError("--results-of belongs to --results FOLDER, which is missing")
    if given.out is None:
        from biphasic.export.folder import MARK, require_export

        if not (Path(given.checkpoint) / MARK).is_file() and not _after_wanted(given):
            raise UserError(f"{given.checkpoint}: the folder to write, OUT, is missing")
        require_export(Path(given.checkpoint))
        alone = {f"--{name}": getattr(given, name) for name in ("initial", "name", "dtype", "tokenizer", "force")}
        if any(alone.values()):
            name = next(name for name, value in alone.items() if value)
            raise UserError(f"{name} belongs to an export, and {given.checkpoint} is one: give a checkpoint and OUT")
        if not _after_wanted(given):
            raise UserError(f"{given.checkpoint} is an export: say what to do with it: --onnx, --results or --push")
    given.dtype = given.dtype or "fp32"
    if given.results is not None:
        from biphasic.export.results import read_results

        read_results(given.results, given.results_of)
    if given.push is not None:
        from biphasic.export.push import require_repo, require_token

        require_repo(given.push)
        if not given.dry_run:
            require_token()
    if given.onnx:
        from biphasic.export.onnx import require_onnx

        require_onnx()


def _after_wanted(given: argparse.Namespace) -> bool:
    return bool(given.onnx or given.results or given.license or given.language or given.push)


def _after(given: argparse.Namespace, folder: Path) -> None:
    """What is done with an exported folder."""
    from biphasic.export.folder import read_card, write_card

    if given.license or given.language:
        from biphasic.export.metadata import changed, checked

        said = {"license": given.license, "language": given.language}
        write_card(folder, checked(changed(read_card(folder), **{key: value for key, value in said.items() if value})))
    if given.results is not None:
        from biphasic.export.results import with_results

        write_card(folder, with_results(read_card(folder), given.results, given.results_of))
        print(f"{folder / 'README.md'}: results of {given.results}")
    if given.onnx:
        from biphasic.export.onnx import export_onnx

        export_onnx(folder)
    if given.push is not None:
        from biphasic.export.push import push

        push(folder, given.push, revision=given.revision, private=given.private, dry_run=given.dry_run)


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
    from biphasic.export.formats import format_of
    from biphasic.export.write import export_checkpoint, export_language_model
    from biphasic.model.backbone import build, hf_config_of
    from biphasic.model.checkpoint import read_record

    dtype = torch.float32 if given.dtype == "fp32" else torch.bfloat16
    if given.initial:
        config = load(given.checkpoint)
        if not isinstance(config, PretrainConfig):
            raise UserError(f"{given.checkpoint}: expected a job: pretrain YAML")
        tokenizer = load_tokenizer(given.tokenizer or config.tokenizer)
        model = build(config.model, config.data.sequence_length, config.seed, tokenizer.vocab_size)
        fmt = format_of(model.config, tokenizer)
        card = untrained_card(config.model_dump(mode="json"), given.name, remote_code=bool(fmt.files))
        count = export_language_model(model, tokenizer, given.out, card, dtype=dtype, force=given.force)
    else:
        with _on_this_machine(given.checkpoint, given.out) as checkpoint:
            record = read_record(checkpoint)
            tokenizer = load_tokenizer(given.tokenizer or yaml.safe_load(record["config"])["tokenizer"])
            fmt = format_of(hf_config_of(record["backbone"]), tokenizer)
            card = pretrained_card(record, given.name, remote_code=bool(fmt.files))
            count = export_checkpoint(checkpoint, fmt, tokenizer, given.out, card, dtype=dtype, force=given.force)
    print(f"{given.out}: {count:,} parameters in {given.dtype}, {fmt.name} format")


@contextmanager
def _on_this_machine(path: str, out: Path) -> Iterator[str]:
    """The checkpoint's local path; what is brought from a bucket lies beside `out` meanwhile.

    What a killed export has left there is used by the next one, as far as it is right.
    """
    from biphasic.checkpointing.fetched import fetched

    folder = out.resolve().with_name(f".{out.name}.fetched")
    try:
        yield fetched(path, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
