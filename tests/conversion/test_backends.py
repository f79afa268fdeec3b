"""Two libraries encode the text: the bytes are the same, and one that differs is left for the whole conversion."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphasic.config.convert import ConvertConfig
from biphasic.conversion import convert as converting
from biphasic.conversion.convert import convert
from biphasic.conversion.verify import verify
from biphasic.data import bulk_encoding
from biphasic.data.packing import document_number
from biphasic.errors import UserError
from helpers.outputs import same_bytes
from helpers.texts import sentences, write_parquet

Make = Callable[..., ConvertConfig]
KEYS: dict[str, Any] = {"unit_bytes": 2**16, "shard_bytes": 1 << 16, "cluster": {"workers": 1}}
COMPARED = next(f"compared-{number}" for number in range(10_000) if document_number(f"compared-{number}") % 100 == 0)


class Wrong:
    """A stand-in for a library that encodes one text otherwise."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def encode(self, text: str) -> np.ndarray:
        ids = np.array(self.tokenizer.encode([text])[0], np.uint32)
        return ids[:-1] if "otherwise" in text else ids


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Five files, of which the fourth has a document that is compared and encoded otherwise."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(5):
        records = sentences(400, seed=number)
        records += [{"id": COMPARED, "text": "this is encoded otherwise"}] if number == 3 else []
        write_parquet(folder / f"{number}.parquet", records)
    return folder


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_encoding, "_load", Wrong)
    monkeypatch.setattr(
        converting,
        "choose_backend",
        lambda tokenizer, wanted, texts: ("tokenizers" if wanted == "tokenizers" else "gigatoken", "for a test"),
    )


def backends(output: Path) -> list[str]:
    return [json.loads(path.read_text())["backend"] for path in sorted((output / "units").iterdir())]


def test_both_give_the_same_bytes_and_either_continues_the_other(
    text: Path, config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = convert(config_for(text, output=str(tmp_path / "plain"), tokenizer_backend="tokenizers", **KEYS))
    assert plain["backends"] == {"tokenizers": len(plain["units"])}
    fast = config_for(text, output=str(tmp_path / "fast"), tokenizer_backend="gigatoken", **KEYS)
    assert convert(fast)["backends"] == {"gigatoken": len(plain["units"])}
    assert "texts are encoded by gigatoken (" in capsys.readouterr().out
    assert same_bytes(tmp_path / "plain", tmp_path / "fast")
    convert(fast.model_copy(update={"tokenizer_backend": "tokenizers"}))
    assert "nothing to do" in capsys.readouterr().out
    # Interrupted after two units, and continued with the other library.
    begun = tmp_path / "begun"
    monkeypatch.setattr(converting, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(fast.model_copy(update={"output": str(begun)}))
    monkeypatch.undo()
    for path in sorted((begun / "units").iterdir())[2:]:
        path.unlink()
    mixed = convert(fast.model_copy(update={"output": str(begun), "tokenizer_backend": "tokenizers"}))
    assert mixed["backends"] == {"gigatoken": 2, "tokenizers": len(plain["units"]) - 2}
    assert same_bytes(tmp_path / "plain", begun)
    assert verify(str(begun)).faults == []


@pytest.mark.usefixtures("wrong")
def test_a_difference_ends_with_tokenizers_for_the_whole_conversion(
    text: Path, config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = convert(config_for(text, output=str(tmp_path / "plain"), tokenizer_backend="tokenizers", **KEYS))
    capsys.readouterr()
    config = config_for(text, output=str(tmp_path / "auto"), **KEYS)
    record = convert(config)
    out = capsys.readouterr().out
    assert "a text of 25 characters differently, from " in out
    assert "the whole conversion is done by tokenizers" in out
    assert record["backends"] == {"tokenizers": len(plain["units"])}
    assert same_bytes(tmp_path / "plain", tmp_path / "auto")
    # Stopped once one unit was converted anew: the others, which gigatoken encoded, are not valid any more.
    begun = tmp_path / "begun"
    driver = converting._Driver

    def stopping(context: Any, *arguments: Any) -> Any:
        if context.difference is not None:
            raise KeyboardInterrupt
        return driver(context, *arguments)

    monkeypatch.setattr(converting, "_Driver", stopping)
    with pytest.raises(KeyboardInterrupt):
        convert(replace_output(config, begun))
    monkeypatch.setattr(converting, "_Driver", driver)
    assert set(backends(begun)) == {"gigatoken"}
    name = next(path.name for path in (tmp_path / "auto" / "units").iterdir() if not (begun / "units" / path.name).exists())
    shutil.copyfile(tmp_path / "auto" / "units" / name, begun / "units" / name)
    shutil.copytree(tmp_path / "auto" / "train" / Path(name).stem, begun / "train" / Path(name).stem, dirs_exist_ok=True)
    record = convert(replace_output(config, begun))
    assert "this conversion goes on with tokenizers" in capsys.readouterr().out
    assert record["backends"] == {"tokenizers": len(plain["units"])}
    assert same_bytes(tmp_path / "plain", begun)


def replace_output(config: ConvertConfig, output: Path) -> ConvertConfig:
    return config.model_copy(update={"output": str(output)})


def test_a_worker_without_gigatoken_ends_with_tokenizers(
    text: Path, config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on another machine of a cluster, whose environment lacks the extra."""
    monkeypatch.setattr(converting, "choose_backend", lambda *_: ("gigatoken", "for a test"))
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    record = convert(config_for(text, output=str(tmp_path / "out"), **KEYS))
    assert record["backends"] == {"tokenizers": len(record["units"])}
    assert "gigatoken can't be used with it" in capsys.readouterr().out


@pytest.mark.usefixtures("wrong")
def test_a_difference_is_an_error_where_the_library_is_named(text: Path, config_for: Make, tmp_path: Path) -> None:
    config = config_for(text, output=str(tmp_path / "out"), tokenizer_backend="gigatoken", **KEYS)
    with pytest.raises(
        UserError, match=r"gigatoken and tokenizers encode a text of 25 characters differently.*\n.*no dataset"
    ):
        convert(config)
    assert not (tmp_path / "out" / "conversion.json").exists()


def test_a_conversion_and_its_workers_load_neither_torch_nor_streaming(text: Path, config_for: Make, tmp_path: Path) -> None:
    config = config_for(text, output=str(tmp_path / "out"), **KEYS)
    code = (
        "import sys\nfrom biphasic.conversion import pool\nfrom biphasic.conversion.convert import convert\n"
        "from biphasic.config.convert import ConvertConfig\n"
        f"convert(ConvertConfig.model_validate({config.model_dump(mode='json')!r}))\n"
        "print(sorted({'torch', 'streaming', 'composer', 'transformers'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[]", run.stderr
