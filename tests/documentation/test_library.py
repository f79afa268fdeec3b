"""docs/library.md: each example runs, in order, and the page is short."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import ComposerModel
from transformers import PreTrainedTokenizerFast

import biphasic
from helpers.decoders import saved_decoder
from helpers.tiny import write_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved_decoder("llama", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    assert isinstance(PreTrainedTokenizerFast.from_pretrained(tmp_path / "model"), PreTrainedTokenizerFast)
    rows = biphasic.pack([list(range(4, 4 + length % 11 + 3)) for length in range(200)], 16)
    loader = torch.utils.data.DataLoader(rows, batch_size=4)  # pyright: ignore[reportArgumentType]
    names: dict[str, Any] = {
        "PATH": str(tmp_path / "model"),
        "loader": loader,
        "torch": torch,
        "ComposerModel": ComposerModel,
    }
    names |= {name: getattr(biphasic, name) for name in biphasic.__all__}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert list((tmp_path / "checkpoints").glob("*ba8*"))


def test_each_name_is_on_the_page_and_the_page_is_short() -> None:
    text = PAGE.read_text()
    for name in biphasic.__all__:
        assert name in text or name in ("Ramp", "Replacement"), name
    assert len(text.split()) < 900


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'biphasic' has no attribute 'Nothing'"):
        _ = biphasic.Nothing
