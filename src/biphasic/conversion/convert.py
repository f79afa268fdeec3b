"""Convert text to MDS shards of packed rows: plan the work units, convert those without a record, merge, publish.

During the conversion the output holds `conversion.started` and the files of finished units, but no index, so nothing can
open it as a dataset. When all units are finished, the command writes `tokenizer/`, `validation/index.json`,
`train/index.json`, and last `conversion.json`, the record:

    config              the complete configuration
    source              commit (of a hub dataset), files (path, bytes, version), left_out (messages on damaged files),
                        unread (files of another kind in the source's folders, by suffix)
    tokenizer           sha256, vocab_size, pad_id, bos_id, eos_id, mask_id, dropout (BPE's, which is turned off)
    sequence_length, dtype, hash
    validation_end      documents whose number (`document_number` of the id) is below it are for validation
    splits.<split>      documents, tokens, rows, fill (tokens / positions), bytes, shards (their number), index_sha256
    documents           read, filtered, skipped (by kind)
    checks              special_names (names of special tokens in the text, which are plain text there), tokens, and those
                        of them that stand for unknown text (unknown_tokens)
    backends            number of work units that each library encoded: tokenizers, gigatoken
    units               names of the work units, in the order of the index
    text_bytes, cpu_seconds (sum over the units), seconds (duration of the command that finished the conversion)
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from biphasic.config.convert import ConvertConfig, FilesSource, HubSource
from biphasic.conversion.output import (
    lock_output,
    publish,
    read_record,
    read_unit_records,
    require_same_files,
    require_same_settings,
    write_error_message,
)
from biphasic.conversion.pool import Job, Progress, UnitResult, open_pool
from biphasic.conversion.reading import Document, Entry, read_up_to_damage
from biphasic.conversion.source_files import DamagedFileError
from biphasic.conversion.sources import (
    FileLayout,
    Sources,
    describe_unread,
    draw_validation,
    find_files,
    find_hub_files,
    hub_commit,
    inspect_files,
)
from biphasic.conversion.tokenizer_checks import tokenizer_remarks
from biphasic.conversion.worker import ConversionContext, Records, UnitRecord, WorkUnit, is_valid, plan_work_units
from biphasic.data.bulk_encoding import Backend, DifferentIdsError, choose_backend
from biphasic.data.same_encoding import encoding_difference
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.errors import UserError
from biphasic.storage import user_errors

_SAMPLES, _SAMPLE_DOCUMENTS = 8, 250
_COMPARED_TEXTS, _COMPARED_CHARACTERS = 500, 4000
_ADVICE = "restore the file and run the same command again, or set on_bad_file: skip"


def convert(config: ConvertConfig) -> dict[str, Any]:
    """Run or resume a `job: convert` YAML, and return its record (see the module's docstring).

    A finished conversion is left unchanged. Raises a UserError if the source, tokenizer or output can't be used, or a
    unit failed; finished units are kept.
    """
    start = time.monotonic()
    tokenizer = load_tokenizer(config.tokenizer)
    context = ConversionContext.of(config, tokenizer)
    finished = read_record(config.output)
    if finished is not None:
        require_same_settings("a conversion", finished["config"], finished["tokenizer"], context)
        commit, source = finished["source"]["commit"], config.source
        if isinstance(source, HubSource) and source.revision not in (None, commit):
            with user_errors(f"source.revision: {source.revision}: can't be looked up", ValueError):
                named = hub_commit(source.path, source.revision)
            if named != commit:
                message = f"holds a conversion of commit {commit}, not of source.revision: {source.revision}"
                raise UserError(f"output {config.output} {message}: choose another output, or remove it")
        require_same_files(finished, config.output, source_files(config, commit).files)
        print(f"{config.output}: already converted from the same text with the same settings; nothing to do")
        return finished
    sources = source_files(config)
    if isinstance(config.source, HubSource) and sources.commit not in (None, config.source.revision):
        print(f"the hub dataset is read at this commit, which others can name too: source.revision: {sources.commit}")
    layouts = inspect_files(sources.files, config)
    units = plan_work_units(layouts, config.unit_bytes)
    damaged = [layout.fault for layout in layouts if layout.fault]
    end, drawn = draw_validation(config, layouts)
    # Damaged files are reported later.
    samples = list(sample_documents(config.model_copy(update={"on_bad_file": "skip"}), layouts))
    # Refused before a file is written, so that the output stays free for the corrected source.
    if not units or not (samples or damaged or len(layouts) > _SAMPLES):
        none = "source: expected documents; the source's files hold none"
        raise UserError("\n".join(_stopping_faults(config, damaged) or [none]))
    texts = [entry.text for entry in samples if isinstance(entry, Document)]
    backend, remarks = check_encoding(config, tokenizer, texts)
    context = replace(ConversionContext.of(config, tokenizer, end), backend=backend)
    try:
        with lock_output(context, units, sources.commit) as (store, earlier):
            if sources.unread:
                print(f"not read: {describe_unread(sources.unread)}")
            print(*remarks, sep="\n")
            if config.validation_fraction:
                print(f"validation: {drawn}")
            differences = [record["difference"] for record in earlier.values() if record["difference"]]
            if backend == "gigatoken" and differences:
                print(f"{differences[0]}: this conversion goes on with tokenizers")
                context = replace(context, backend="tokenizers", difference=differences[0])
            try:
                records = _Driver(context, units, damaged, earlier).run()
            except DifferentIdsError as error:
                print(f"{error}: the whole conversion is done by tokenizers")
                context = replace(context, backend="tokenizers", difference=str(error))
                records = _Driver(context, units, damaged, read_unit_records(store)).run()
            return publish(store, context, records, sources, damaged, time.monotonic() - start)
    except OSError as error:
        raise UserError(write_error_message(config.output, error)) from error


def sample_documents(config: ConvertConfig, layouts: list[FileLayout]) -> Iterator[Entry]:
    """Yield the first entries of up to eight places: row groups of Parquet files, and the beginnings of other files."""
    places = [
        (layout.file, None if group is None else (group, group + 1))
        for layout in layouts
        for group in (range(len(layout.rows)) if layout.rows else [None])
        if layout.fault is None
    ]
    for position in np.unique(np.linspace(0, len(places) - 1, min(_SAMPLES, len(places))).round().astype(int)):
        file = replace(places[position][0], row_groups=places[position][1])
        yield from islice(read_up_to_damage(file, config, []), _SAMPLE_DOCUMENTS)


def check_encoding(config: ConvertConfig, tokenizer: Tokenizer, texts: list[str]) -> tuple[Backend, list[str]]:
    """Choose the library that encodes texts such as these, and return it with the remarks on how they are encoded.

    Raises a UserError if AutoTokenizer encodes one otherwise, or `tokenizer_backend` can't be used.
    """
    if (difference := encoding_difference(tokenizer, texts, add_special_tokens=False)) is not None:
        raise UserError(difference)
    # Both libraries encode the beginnings of some of the texts, spread evenly.
    compared = [text[:_COMPARED_CHARACTERS] for text in texts[:: -(-len(texts) // _COMPARED_TEXTS) or 1]]
    backend, reason = choose_backend(tokenizer, config.tokenizer_backend, compared)
    return backend, [*tokenizer_remarks(config, tokenizer), f"texts are encoded by {backend} ({reason})"]


def source_files(config: ConvertConfig, commit: str | None = None) -> Sources:
    """Return the files that the YAML's `source:` names. Of a hub dataset, `commit` replaces the YAML's revision.

    Raises a UserError if there is no usable file.
    """
    if isinstance(config.source, FilesSource):
        return find_files(config.source)
    return find_hub_files(config.source.model_copy(update={"revision": commit or config.source.revision}))


def inspect_sources(config: ConvertConfig) -> tuple[Sources, list[FileLayout]]:
    """Return the files of the YAML's `source:` and their layouts, for a plan or for training a tokenizer.

    Raises a UserError if there is no usable file, or one can't be read and the YAML says to stop.
    """
    sources = source_files(config)
    layouts = inspect_files(sources.files, config)
    if faults := _stopping_faults(config, [layout.fault for layout in layouts if layout.fault]):
        raise UserError("\n".join(faults))
    return sources, layouts


def _stopping_faults(config: ConvertConfig, damaged: list[str]) -> list[str]:
    return [f"{fault}; {_ADVICE}" for fault in damaged if config.on_bad_file == "stop"]


class _Driver:
    """Converts the units that have no valid record yet.

    With `max_tokens`, the dataset is the first units, and the last of these ends at the limit, whichever unit is finished
    first. A unit is given the tokens that the finished units before it leave. When all before it are finished, these may
    be fewer: if the limit then lies in this unit, it is converted a second time.
    """

    def __init__(self, context: ConversionContext, units: list[WorkUnit], damaged: list[str], earlier: Records):
        self.context, self.units, self.damaged = context, units, damaged
        self.faults = _stopping_faults(context.config, damaged)
        self.stopping, self.records = False, Records()
        self._taken = 0  # training tokens of the finished units before the next job
        for unit, remaining in self._remaining():
            record = earlier.get(unit.name)
            if record is not None and is_valid(record, unit, context):
                stopped_at = record["stopped_at"]
                if stopped_at is None or (remaining is not None and stopped_at >= remaining):
                    self.records[unit.name] = record

    def run(self) -> list[tuple[WorkUnit, UnitRecord]]:
        """Convert the units, and return those that make up the dataset, with their records.

        Raises a UserError that lists all faults, one per line, after everything else has been converted.
        """
        config = self.context.config
        waiting = sum(unit.name not in self.records and remaining != 0 for unit, remaining in self._remaining())
        with (
            closing(Progress(config, self.units, self.records)) as progress,
            open_pool(self.context, waiting, progress) as convert_all,
        ):
            for message in self.damaged:
                tqdm.write(message)
            for result in convert_all(self._jobs()):
                self._take(result)
            selected, last = self._select()
            if last is not None and not self.faults:
                for result in convert_all(iter([last])):
                    self._take(result)
                selected, _ = self._select()
        if self.faults:
            count = f"{len(self.records)} of {len(self.units)} work units are finished and kept"
            raise UserError("\n".join([*self.faults, f"{config.output}: {count}; no dataset is published yet"]))
        return selected

    def _jobs(self) -> Iterator[Job]:
        limit = self.context.config.max_tokens
        for unit in self.units:
            # Asked for each job, because earlier units may have finished meanwhile.
            remaining = None if limit is None else max(limit - self._taken, 0)
            if unit.name in self.records:
                self._taken += self._tokens(unit)
                continue
            if remaining == 0 or self.stopping:
                return
            yield unit, remaining

    def _take(self, result: UnitResult) -> None:
        unit, record, error = result
        if isinstance(error, DifferentIdsError) and self.context.config.tokenizer_backend == "auto":
            raise error
        if record is not None:
            self.records[unit.name] = record
            self._taken += self._tokens(unit)
            for line in (*record["damaged"], *record["documents"]["examples"]):
                tqdm.write(f"skipped: {line}")
        else:
            # A damaged file does not stop the other units.
            is_damaged = isinstance(error, DamagedFileError)
            self.faults.append(f"{error}; {_ADVICE}" if is_damaged else str(error))
            self.stopping = self.stopping or not is_damaged
            tqdm.write(str(error))

    def _remaining(self) -> Iterator[Job]:
        """Yield each unit with the training tokens that remain after the finished units before it; None means no limit."""
        limit, taken = self.context.config.max_tokens, 0
        for unit in self.units:
            yield unit, None if limit is None else max(limit - taken, 0)
            taken += self._tokens(unit)

    def _tokens(self, unit: WorkUnit) -> int:
        record = self.records.get(unit.name)
        return 0 if record is None else record["splits"]["train"]["tokens"]

    def _select(self) -> tuple[list[tuple[WorkUnit, UnitRecord]], Job | None]:
        """Return the units up to the limit or to one without a record, and the job of the one to stop at it."""
        selected: list[tuple[WorkUnit, UnitRecord]] = []
        for unit, remaining in self._remaining():
            record = self.records.get(unit.name)
            if record is None or remaining == 0:
                break
            # A unit that was not stopped at this limit may hold validation documents that come after it.
            is_over = remaining is not None and record["splits"]["train"]["tokens"] >= remaining
            if is_over and record["stopped_at"] != remaining:
                return selected, (unit, remaining)
            selected.append((unit, record))
        return selected, None
