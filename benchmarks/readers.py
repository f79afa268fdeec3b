"""Who reads whose folders: exports of each kind in other software, and other software's folders in Biphasic.

Small random models (reader_folders.py) are loaded by the packages of READERS, each version in a process of its own
(reader_load.py), and compared with Biphasic's own outputs on the same texts. Needs a package registry; the packages lie in a
temporary folder, before the environment's own, whose torch they share. Takes about ten minutes on two cores.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from workload import ROOT, report, say

TOLERANCE = 1e-3
FOUR = ("transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub==0.36.0", "datasets==4.0.0")
ONE = ("tokenizers==0.22.2", "huggingface_hub==1.33.0")
ST_6 = ("sentence-transformers==6.0.0", "transformers==5.9.0")
OPTIMUM = ("optimum==2.1.0", "optimum-onnx==0.1.0")


@dataclass(frozen=True)
class Reader:
    """Software that reads exports: its name, its actions in reader_load.py, and packages beside the environment's."""

    name: str
    library: str
    packages: tuple[str, ...] = ()


READERS = (
    Reader("transformers 4.57.6", "transformers", FOUR),
    Reader("transformers 5.0.0", "transformers", ("transformers==5.0.0", *ONE)),
    Reader("transformers 5.9.0", "transformers", ("transformers==5.9.0", *ONE)),
    Reader(f"transformers {version('transformers')}", "transformers"),
    Reader("sentence-transformers 5.1.2", "sentence-transformers", ("sentence-transformers==5.1.2", *FOUR, *OPTIMUM)),
    Reader("sentence-transformers 6.0.0", "sentence-transformers", (*ST_6, *ONE)),
    Reader(f"sentence-transformers {version('sentence-transformers')}", "sentence-transformers"),
    Reader("optimum-onnx 0.1.0", "optimum-onnx", (*OPTIMUM, *FOUR)),
    Reader(f"onnxruntime {version('onnxruntime')}", "onnxruntime"),
    Reader("fastembed 0.9.1", "fastembed", ("fastembed==0.9.1", "loguru", "py-rust-stemmers", "mmh3")),
    Reader(
        "PyLate 1.6.0", "PyLate",
        ("pylate==1.6.0", "sentence-transformers==5.3.0", "transformers==5.3.0", "fast-plaid", "fastkmeans==0.5.0", *ONE),
    ),
    Reader("llama.cpp's converter (llama-cpp-python 0.3.36)", "llama.cpp", ("gguf",)),
)  # fmt: skip
"""What is run. sentence-transformers 5.1.2 runs on transformers 4.57.6, the last that optimum-onnx takes."""
LLAMA_CPP = "llama-cpp-python==0.3.36"


def run(command: list[str | Path], **environment: str) -> str:
    """Run a command, and return its output. Raises a RuntimeError with the output's end if it fails."""
    path = str(ROOT / "src")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **environment}
    # Not in the repository, whose pyproject.toml replaces versions.
    done = subprocess.run(
        list(map(str, command)), env=variables, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def install(packages: tuple[str, ...], folder: Path) -> Path:
    """Install packages without their requirements into a folder."""
    uv = [Path(sys.executable).parent / "uv", "pip", "install", "--quiet", "--python", sys.executable]
    if packages:
        run([*uv, "--no-deps", "--target", folder, *packages])
    return folder


def converter(work: Path) -> Path:
    """Return the folder of llama.cpp's converter, from the source of llama-cpp-python."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", work]
    run([*pip, LLAMA_CPP])
    run(["tar", "--extract", "--file", next(work.glob("*.tar.gz")), "--directory", work])
    return next(work.glob("*/vendor/llama.cpp"))


def read(reader: Reader, work: Path, number: int) -> dict[str, Any]:
    """Let a reader take every folder's actions, and return its results."""
    say(reader.name)
    packages = install(reader.packages, work / "packages" / str(number))
    out, home = work / f"results-{number}.json", str(work / "home" / str(number))
    more = {"LLAMA_CPP": str(converter(work / "llama"))} if reader.library == "llama.cpp" else {}
    script = Path(__file__).with_name("reader_load.py")
    run(
        [sys.executable, script, work, out, reader.library],
        PYTHONPATH=str(packages), HF_HOME=home, HF_MODULES_CACHE=f"{home}/modules", **more,
    )  # fmt: skip
    return json.loads(out.read_text(encoding="utf-8"))


def verdict(result: dict[str, Any], expected: Any, folder: str) -> tuple[str, float | None]:
    """Return what became of one action, and the largest difference."""
    if "error" in result:
        return "refused", None
    outputs, right = np.array(result["outputs"], float), np.array(expected, float)
    difference = float(np.abs(outputs.ravel() - right.ravel()).max()) if outputs.size == right.size else float("inf")
    if difference <= TOLERANCE:
        return "equal", difference
    if folder.endswith("int8"):
        return f"int8: {difference:.0e}", difference
    warned = "newly initialized" in result["heard"] or "MISSING" in result["heard"]
    return "another head, with a warning" if warned else "WRONG", difference


def cells(actions: dict[str, Any], results: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the verdict of each action that a reader took with a folder."""
    return {
        action: {"verdict": (found := verdict(result, actions[folder][action]["expected"], folder))[0],
                 "difference": found[1], "error": result.get("error", "")[:200]}
        for action, result in results.get(folder, {}).items()
    }  # fmt: skip


def table(numbers: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for folder in next(iter(numbers["read"].values())):
        row = [folder]
        for folders in numbers["read"].values():
            counts = Counter(cell["verdict"] for cell in folders[folder].values())
            row.append("; ".join(counts))
        rows.append(row)
    return ["export", *numbers["read"]], rows


def theirs(work: Path) -> dict[str, dict[str, str]]:
    """Let other software write folders, and return what Biphasic makes of each, by way."""
    script, out = Path(__file__).with_name("reader_theirs.py"), work / "theirs.json"
    for number, reader in enumerate(READERS):
        if reader.name.split()[0] in ("sentence-transformers", "PyLate"):
            say(f"folders by {reader.name}")
            run([sys.executable, script, "write", work], PYTHONPATH=str(work / "packages" / str(number)))
    say("their folders in Biphasic")
    run([sys.executable, script, "read", work, out])
    return json.loads(out.read_text(encoding="utf-8"))


def their_table(results: dict[str, dict[str, str]]) -> str:
    """Return what Biphasic makes of their folders as a table: equal, or the message."""
    ways = list(next(iter(results.values())))
    rows = [["folder by", *ways], ["---"] * (len(ways) + 1)]
    versions: dict[tuple[str, ...], list[str]] = {}
    for name, result in results.items():
        software, _, kind = name.partition(", ")
        package, _, number = software.rpartition(" ")
        versions.setdefault((package, kind, *(result[way].replace("|", "/") for way in ways)), []).append(number)
    for (package, kind, *outcomes), numbers in sorted(versions.items()):
        rows.append([f"{package} {', '.join(numbers)}: {kind}", *outcomes])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        say("exports of every kind")
        run([sys.executable, Path(__file__).with_name("reader_folders.py"), work])
        actions = json.loads((work / "actions.json").read_text(encoding="utf-8"))
        numbers: dict[str, Any] = {"read": {}}
        for number, reader in enumerate(READERS):
            results = read(reader, work, number)
            numbers["read"][reader.name] = {folder: cells(actions, results, folder) for folder in actions}
        numbers["theirs"] = theirs(work)
    note = f"""equal: within {TOLERANCE:g} of Biphasic's own outputs; refused: an error; no entry: not tried. Random weights,
one thread, texts of 3 to 50 tokens, padded. `...-int8` gives the largest difference of the numbers. sentence-transformers
before 6 removes spaces at a text's ends, and there are none here; its ONNX backend needs optimum-onnx, which takes no
transformers 5.

The cross-encoders are classifiers of pairs, whose exports make an index error of a tokenizer's pair (docs/export.md).

Other software's folders in Biphasic: equal to their own embeddings or logits, or refused with the message.

{their_table(numbers["theirs"])}

Exports in other software:"""
    report("readers", "Who reads an export", *table(numbers), numbers, note=note)


if __name__ == "__main__":
    main()
