"""The speed of conversion from text to shards: `make bench-data`.

The text is the docstrings of the installed packages, repeated under other ids up to the requested size, with a tokenizer of
32,768 words that is trained on them. Each part runs in its own process, with two threads or workers:

    encode      `encode_batch` of `tokenizers` over texts in memory
    convert     `biphasic convert`: reading Parquet, tokenizing with gigatoken, packing, compressing, writing, hashing
    tokenizers  the same, tokenizing with `tokenizers`
    plain       a common converter: one process, one text at a time, concatenate and chop, MDSWriter

Memory is the peak of all of convert's processes, at the requested size and at ten times that size. Rates count the tokens
of the text. The start of the processes, which is the same for any size, is reported separately.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workload import report

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "bench-data"
WORDS, LENGTH, FILE_BYTES, UNIT_BYTES = 32768, 2048, 16_000_000, 32 * 2**20
THREADS = 2


def make_text(megabytes: int) -> Path:
    """Write Parquet files of about `megabytes` of text, in FineWeb-Edu's columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = FOLDER / f"text-{megabytes}"
    if folder.exists():
        return folder
    documents = FOLDER / "docstrings" / "documents.parquet"
    if not documents.exists():
        sys.path.insert(0, str(ROOT / "recipes" / "quickstart"))
        from gather import gather

        gather(documents.parent)
    table = pq.read_table(documents, columns=["id", "text"]).to_pydict()
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    size = number = round_ = 0
    ids: list[str] = []
    texts: list[str] = []
    while size < megabytes * 1e6:
        held = 0
        for id, text in zip(table["id"], table["text"], strict=True):
            ids.append(f"{id}-{round_}")
            texts.append(text)
            held += len(text)
            size += len(text)
            if held >= FILE_BYTES or size >= megabytes * 1e6:
                rows = pa.table({"id": ids, "text": texts})
                pq.write_table(rows, partial / f"{number:05d}.parquet", row_group_size=1000, compression="zstd")
                number, held, ids, texts = number + 1, 0, [], []
            if size >= megabytes * 1e6:
                break
        round_ += 1
    partial.rename(folder)
    return folder


def make_tokenizer(text: Path) -> Path:
    folder = FOLDER / "tokenizer"
    if not folder.exists():
        from biphasic.config.convert import ConvertConfig
        from biphasic.conversion.train_tokenizer import train_tokenizer

        source = {"kind": "files", "paths": [str(sorted(text.iterdir())[0])]}
        keys = {"job": "convert", "source": source, "tokenizer": str(folder), "output": str(FOLDER / "unused")}
        train_tokenizer(ConvertConfig.model_validate(keys), folder, size=WORDS)
    return folder


def batches(text: Path) -> Iterator[list[str]]:
    import pyarrow.parquet as pq

    for path in sorted(text.iterdir()):
        for batch in pq.ParquetFile(path).iter_batches(1000, columns=["text"]):
            yield batch.column("text").to_pylist()


def encode(text: Path, tokenizer: Path) -> dict[str, float]:
    from tokenizers import Tokenizer

    fast_tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    tokens, seconds = 0, 0.0
    for batch in batches(text):
        start = time.perf_counter()
        encoded = fast_tokenizer.encode_batch(batch, add_special_tokens=False)
        seconds += time.perf_counter() - start
        tokens += sum(len(encoding) for encoding in encoded) + len(encoded)
    return {"tokens": tokens, "seconds": seconds, "start": 0.0}


def convert(text: Path, tokenizer: Path, backend: str = "gigatoken") -> dict[str, float]:
    output = FOLDER / "converted"
    shutil.rmtree(output, ignore_errors=True)
    yaml = FOLDER / "convert.yaml"
    yaml.write_text(
        f"job: convert\nsource: {{kind: files, paths: ['{text}']}}\noutput: {output}\ntokenizer: {tokenizer}\n"
        f"sequence_length: {LENGTH}\nvalidation_fraction: 0.01\nunit_bytes: {UNIT_BYTES}\n"
        f"cluster: {{workers: {THREADS}}}\ntokenizer_backend: {backend}\n"
    )
    start = time.time()
    command = [sys.executable, "-m", "biphasic", "convert", str(yaml)]
    peak, status = _watched(command, start)
    assert status == 0
    total = time.time() - start
    record = json.loads((output / "conversion.json").read_text())
    # Before the first worker starts its first unit there are only imports.
    units = [*(output / "units").iterdir()]
    begins = min(path.stat().st_mtime - json.loads(path.read_text())["seconds"] for path in units)
    tokens = sum(split["tokens"] for split in record["splits"].values())
    stored = sum(split["bytes"] for split in record["splits"].values())
    shutil.rmtree(output)
    return {
        "tokens": tokens,
        "seconds": total,
        "start": begins - start,
        "peak_bytes": peak,
        "fill": record["splits"]["train"]["fill"],
        "stored_bytes_per_token": stored / tokens,
        "text_bytes_per_token": record["text_bytes"] / tokens,
        "core_tokens_per_second": tokens / record["cpu_seconds"],
    }


def _watched(command: list[str], start: float) -> tuple[int, int]:
    """Run a command; returns the peak memory of its processes (shared pages counted once), and its exit status."""
    import psutil

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        try:
            processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            peak = max(peak, sum(_memory(member) for member in processes))
        except psutil.Error:
            pass
        time.sleep(0.5)
    return peak, process.returncode


def _memory(process: Any) -> int:
    import psutil

    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0


def plain(text: Path, tokenizer: Path) -> dict[str, float]:
    import numpy as np
    from streaming import MDSWriter
    from transformers import AutoTokenizer

    tokenize: Callable[..., Any] = AutoTokenizer.from_pretrained(str(tokenizer))
    output = FOLDER / "plain"
    shutil.rmtree(output, ignore_errors=True)
    end = tokenize.eos_token_id  # pyright: ignore[reportFunctionMemberAccess]
    start = time.perf_counter()
    tokens, buffer = 0, []
    columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
    with MDSWriter(out=str(output), columns=columns, compression="zstd", hashes=["xxh64"]) as writer:
        for batch in batches(text):
            for document in batch:
                ids = tokenize(document, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
                buffer += [*ids, end]
                tokens += len(ids) + 1
                while len(buffer) >= LENGTH:
                    writer.write({"tokens": np.array(buffer[:LENGTH], np.uint16)})
                    buffer = buffer[LENGTH:]
    seconds = time.perf_counter() - start
    shutil.rmtree(output)
    return {"tokens": tokens, "seconds": seconds, "start": 0.0}


def convert_with_tokenizers(text: Path, tokenizer: Path) -> dict[str, float]:
    return convert(text, tokenizer, "tokenizers")


PARTS: dict[str, Callable[[Path, Path], dict[str, float]]] = {
    "encode": encode, "convert": convert, "tokenizers": convert_with_tokenizers, "plain": plain,
}  # fmt: skip


def part(name: str, text: Path, tokenizer: Path) -> dict[str, float]:
    environment = {**os.environ, "RAYON_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "true"}
    print(f"{name} over {text.name} …", file=sys.stderr, flush=True)
    run = subprocess.run(
        [sys.executable, __file__, "--part", name, str(text), str(tokenizer)],
        env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


def rate(result: dict[str, float]) -> float:
    return result["tokens"] / (result["seconds"] - result["start"])


def table(numbers: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    best = {name: max((run[name] for run in numbers["runs"]), key=rate) for name in PARTS}
    large, megabytes = numbers["large"], numbers["megabytes"]

    def row(label: str, result: dict[str, float], measured: float) -> list[str]:
        over = {name: measured / rate(best[name]) for name in ("encode", "plain")}
        numbers.setdefault("ratios", {})[label] = over
        peak = f"{result['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in result else ""
        ratios = (f"{ratio:.2f}" for ratio in over.values())
        return [label, f"{measured:,.0f}", f"{measured / THREADS:,.0f}", *ratios, peak]

    rows = [
        row("`encode_batch` alone, 2 threads", best["encode"], rate(best["encode"])),
        row("plain converter, 1 process", best["plain"], rate(best["plain"])),
    ]
    name = f"`biphasic convert` with tokenizers, {megabytes:,} MB, 2 workers"
    rows.append(row(name, best["tokenizers"], rate(best["tokenizers"])))
    for size, result in ((megabytes, best["convert"]), (10 * megabytes, large)):
        if result is not None:
            name, start = (
                f"`biphasic convert` with gigatoken {version('gigatoken')}, {size:,} MB, 2 workers",
                result["start"],
            )
            rows.append(row(name, result, rate(result)))
            rows.append(row(f"{name}, with its start of {start:.0f} s", result, result["tokens"] / result["seconds"]))
    if large is not None:
        numbers["memory_ratio"] = large["peak_bytes"] / best["convert"]["peak_bytes"]
    return ["", "tokens/s", "tokens/s a core of 2", "over `encode_batch`", "over plain", "peak GiB"], rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversion against the tokenizer alone and a plain converter.")
    parser.add_argument("--megabytes", type=int, default=200, help="text; memory is also measured at ten times as much")
    parser.add_argument("--repeats", type=int, default=2, help="of encode, convert and plain; the fastest counts")
    parser.add_argument("--no-memory", action="store_true", help="leave out the ten times as large conversion")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        name, text, tokenizer = options.part
        print(json.dumps(PARTS[name](Path(text), Path(tokenizer))))
        return
    text = make_text(options.megabytes)
    tokenizer = make_tokenizer(text)
    # In turn, so that a slow minute of the machine affects all of them.
    runs = [{name: part(name, text, tokenizer) for name in PARTS} for _ in range(options.repeats)]
    large = None if options.no_memory else part("convert", make_text(10 * options.megabytes), tokenizer)
    numbers = {"megabytes": options.megabytes, "threads": THREADS, "runs": runs, "large": large}
    report("data", "Conversion", *table(numbers), numbers)


if __name__ == "__main__":
    main()
