"""Keep AutoTokenizer from encoding texts otherwise than an export's tokenizer.json says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import tokenizers

from biphasic.storage import first_line

_log = logging.getLogger(__name__)
_TEXTS = (
    "The quick brown fox doesn't jump over 12,345 Lazy DOGS in 2026; it's (nearly) 3.14 o'clock.",
    "  Spaces  before,\tand\nlines\r\n\r\n    def f(x_1): return x**2 != 0",
    "École naïve Ñandú straße ﬁne İstanbul ΟΔΟΣ e\u0301 \uff46\uff55 \u00a0 \u200b «word» — “quotes” … 🙂👍🏽",
    "Привет, мир! 你好,世界。東京タワー 안녕하세요 مرحبا بالعالم नमस्ते שלום สวัสดี",
)
_SAMPLE = 200
_PLAIN_SETTINGS = ("model_max_length", "model_input_names", "clean_up_tokenization_spaces", "padding_side")


def keep_encoding(folder: Path) -> None:
    """Replace the class in a folder's tokenizer_config.json if AutoTokenizer encodes some texts otherwise with it.

    The general class, `PreTrainedTokenizerFast`, reads tokenizer.json as it is. It gets the names of the special tokens
    and no settings of another class.
    """
    if (difference := _difference(folder)) is None:
        return
    file = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    plain = {name: settings[name] for name in _PLAIN_SETTINGS if name in settings}
    plain |= {
        name: value for name, value in settings.items() if name.endswith("_token") and not isinstance(value, bool)
    }
    plain["tokenizer_class"] = "PreTrainedTokenizerFast"
    text = json.dumps(plain, indent=2, ensure_ascii=False, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")
    if (difference := _difference(folder)) is not None:
        _log.warning(
            "export: AutoTokenizer doesn't encode as tokenizer.json says (%s): load tokenizer.json", difference
        )


def _difference(folder: Path) -> str | None:
    """Return the beginning of a text that AutoTokenizer encodes otherwise than tokenizer.json, or why it can't load it."""
    from transformers import AutoTokenizer

    written = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer
    except Exception as error:  # of a class without its package, without the tokenizers library, or with its own code
        return first_line(error)
    for each in (written, loaded):
        each.encode_special_tokens = True
        each.no_truncation()
        each.no_padding()
    vocabulary = range(0, written.get_vocab_size(), max(written.get_vocab_size() // _SAMPLE, 1))
    words = written.decode(list(vocabulary), skip_special_tokens=True)
    differing = (text for text in (*_TEXTS, words) if written.encode(text).ids != loaded.encode(text).ids)
    return next((repr(text[:40]) for text in differing), None)
