"""An encoder as fine-tuning and evaluation use it: tokens in, hidden states out, whatever it was loaded from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from tqdm import tqdm

from biphasic.config.errors import UserError
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.model import attention
from biphasic.model.backbone import from_checkpoint, hf_config_at, learn_every_token, load_language_model
from biphasic.model.checkpoint import Checkpoint, is_checkpoint, read_checkpoint
from biphasic.model.packed import encode
from biphasic.model.padded import encode_in_groups, looks_both_ways
from biphasic.model.pooling import Pooling, Sentences, read_sentences
from biphasic.model.segments import Segments

_PORTION = 5000
"""Texts that are tokenized at a time."""
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 65536}
"""Tokens in a forward pass of `Encoder.embed`, by the kind of device: on CPUs what a layer makes should fit their caches."""


@dataclass(frozen=True)
class Reader:
    """How an encoder's texts become tokens.

    `prefix` and `suffix` are what its own tokenizer puts around a text, such as BERT's [CLS] and [SEP]; nothing for what
    Biphasic has trained.
    """

    tokenizer: Tokenizer
    longest: int
    """Tokens that it takes, special ones included."""
    sentences: Sentences = field(default_factory=Sentences)
    """What its files say of prompts and pooling."""
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @property
    def nothing(self) -> int:
        """What stands for a text without tokens: the end of text."""
        return self.tokenizer.pad_id if self.tokenizer.eos_id is None else self.tokenizer.eos_id

    def around(self, ids: Sequence[int], longest: int) -> list[int]:
        """A text's tokens, cut so that the whole has at most `longest`, within prefix and suffix; never empty."""
        room = longest - len(self.prefix) - len(self.suffix)
        whole = [*self.prefix, *ids[: max(room, 0)], *self.suffix]
        return whole[:longest] or [self.nothing]

    def read(self, texts: Sequence[str], longest: int, title: str = "") -> Iterator[list[int]]:
        """Token ids of each text, one by one; with a `title`, a bar where it takes long."""
        for portion in _portions(texts, title):
            if self.sentences.lowercase:
                portion = [text.lower() for text in portion]
            for ids in self.tokenizer.encode(portion):
                yield self.around(ids, longest)

    def read_with_offsets(
        self, texts: Sequence[str], title: str = ""
    ) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Token ids of each text, nothing around them and nothing cut, and the characters that each stands for."""
        for portion in _portions(texts, title):
            yield from self.tokenizer.encode_with_offsets(portion)


@dataclass
class Encoder:
    """A network and its way of reading; `max_length` counts tokens, the prompt's included."""

    backbone: nn.Module
    reader: Reader
    max_length: int = 0

    def __post_init__(self) -> None:
        self.max_length = self.max_length or self.reader.longest

    @property
    def tokenizer(self) -> Tokenizer:
        """The reader's."""
        return self.reader.tokenizer

    @property
    def width(self) -> int:
        """Of hidden states."""
        return self.backbone.config.hidden_size  # pyright: ignore

    @property
    def packs(self) -> bool:
        """Whether texts go through it without any padding."""
        return self.backbone.config._attn_implementation == attention.NAME  # pyright: ignore

    def tokenize(self, texts: Sequence[str], prompt: str = "") -> list[list[int]]:
        """Token ids of each text behind the prompt, cut to `max_length`; an empty text is one end-of-text token."""
        return list(self.reader.read([prompt + text for text in texts], self.max_length))

    def hidden(self, tokens: Tensor, segments: Segments) -> Tensor:
        """Hidden states of a flat run of tokens, each segment seen from both sides: int64 [tokens] to [tokens, width]."""
        if self.packs:
            return encode(self.backbone, tokens, segments, causal=False)
        return encode_in_groups(self.backbone, tokens, segments, self.tokenizer.pad_id)

    @property
    def prompts(self) -> dict[str, str]:
        """What goes before texts, by role (`query`, `document`) or task."""
        return self.reader.sentences.prompts

    @property
    def pooling(self) -> Pooling:
        """As its files say, or else the mean, which is what Biphasic trains."""
        return self.reader.sentences.pooling or Pooling()

    def choose_pooling(self, pooling: Pooling) -> None:
        """Say how to pool, for a model whose files don't."""
        self.reader = replace(self.reader, sentences=replace(self.reader.sentences, pooling=pooling))

    @torch.inference_mode()
    def embed(
        self,
        texts: Sequence[Sequence[int]],
        progress: Callable[[int], object] | None = None,
        tokens_at_once: int | None = None,
    ) -> Tensor:
        """Pooled embeddings of token lists, fp32 [texts, width] on the CPU.

        Texts of like length share a forward pass.

        Args:
            texts: token ids, none empty.
            progress: is told how many more texts are done.
            tokens_at_once: in a forward pass, about; default: by the device.
        """
        device = next(self.backbone.parameters()).device
        at_once = tokens_at_once or TOKENS_AT_ONCE.get(device.type, TOKENS_AT_ONCE["cpu"])
        embeddings = torch.empty((len(texts), self.width))
        for chosen in passes([len(text) for text in texts], at_once):
            segments = Segments.of([len(texts[index]) for index in chosen], device)
            tokens = torch.tensor([token for index in chosen for token in texts[index]], dtype=torch.int64)
            hidden = self.hidden(tokens.to(device, non_blocking=True), segments)
            embeddings[chosen] = self.pooling(hidden, segments).cpu()
            if progress is not None:
                progress(len(chosen))
        return embeddings


def _portions(texts: Sequence[str], title: str) -> Iterator[list[str]]:
    with tqdm(total=len(texts), desc=title, unit="text", delay=5, leave=False, disable=None if title else True) as bar:
        for at in range(0, len(texts), _PORTION):
            portion = list(texts[at : at + _PORTION])
            yield portion
            bar.update(len(portion))


def passes(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Texts by index, the shortest first, in forward passes of at most `tokens` tokens (a longer text has its own)."""
    chosen: list[int] = []
    held = 0
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if chosen and held + lengths[index] > tokens:
            yield chosen
            chosen, held = [], 0
        chosen.append(index)
        held += lengths[index]
    if chosen:
        yield chosen


def load_reader(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Reader:
    """An encoder's tokenizer and settings, without its weights. Arguments and errors as for `load_encoder`."""
    if is_checkpoint(path):
        return _reader_of(read_checkpoint(path))
    longest: int = hf_config(path, revision, trust_remote_code).max_position_embeddings
    tokenizer = load_tokenizer(path, revision)
    sentences = read_sentences(path, revision)
    # Some count reserved positions too (RoBERTa); their tokenizer knows better.
    longest = min(longest, int(tokenizer.settings.get("model_max_length") or longest))
    prefix, suffix = tokenizer.around()
    return Reader(tokenizer, sentences.longest or longest, sentences, prefix, suffix)


def load_encoder(path: str, trust_remote_code: bool = False, revision: str | None = None) -> Encoder:
    """An encoder in fp32, on the CPU, that looks both ways.

    Args:
        path: an exported folder, a Biphasic checkpoint, a Hugging Face folder (a decoder is taken as an encoder, an encoder
            as it is) or a hub id.
        trust_remote_code: let it run its own Python files.
        revision: of a hub id.

    Raises:
        UserError: nothing usable is there, or what is there looks back only.
    """
    if is_checkpoint(path):
        checkpoint = read_checkpoint(path)
        return Encoder(from_checkpoint(checkpoint).backbone, _reader_of(checkpoint))
    config, exported = _hf_config(path, revision, trust_remote_code)
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    own_code = trust_remote_code and "AutoModel" in (getattr(config, "auto_map", None) or {})
    attention.register()
    if exported or (config.model_type == "eurobert" and not own_code):
        backbone = _from_pretrained(path, revision, config, attn_implementation=attention.NAME)
        learn_every_token(backbone)
    elif own_code or type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        backbone = _from_pretrained(path, revision, config, trust_remote_code=trust_remote_code)
        if not looks_both_ways(backbone.eval(), config.vocab_size):
            raise UserError(f"model {path}: its own code looks back only: an encoder has to look both ways")
    else:
        backbone = load_language_model(path, trust_remote_code, revision).backbone
    reader = load_reader(path, revision, trust_remote_code)
    rows: int = backbone.get_input_embeddings().weight.shape[0]  # pyright: ignore
    used = reader.tokenizer.vocab_size - (reader.tokenizer.mask_id == reader.tokenizer.vocab_size - 1)
    if used > rows:
        raise UserError(
            f"model {path}: its tokenizer has {used:,} tokens, its embedding {rows:,}: they don't belong together"
        )
    return Encoder(backbone, reader)


def _reader_of(checkpoint: Checkpoint) -> Reader:
    config = yaml.safe_load(checkpoint.record["config"])
    return Reader(load_tokenizer(config["tokenizer"]), config["data"]["sequence_length"])


def hf_config(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A Hugging Face folder's or hub id's configuration.

    Raises:
        UserError: there is none.
    """
    return _hf_config(path, revision, trust_remote_code)[0]


def _hf_config(path: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, bool]:
    """And whether it is an export of another family, see `hf_config_at`."""
    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise UserError(f"model {path}: can't be loaded (there is no such checkpoint or folder)")
    try:
        return hf_config_at(path, revision, trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        where = "this folder" if Path(path).is_dir() else "no such checkpoint or folder here, and from the hub"
        raise UserError(f"model {path}: can't be loaded ({where}: {str(error).strip().splitlines()[0]})") from None


def _from_pretrained(path: str, revision: str | None, config: Any, **options: Any) -> nn.Module:
    from safetensors import SafetensorError
    from transformers import AutoModel

    try:
        backbone, info = AutoModel.from_pretrained(
            path, config=config, revision=revision, dtype=torch.float32, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, KeyError, ImportError) as error:
        raise UserError(f"model {path}: can't be loaded ({str(error).strip().splitlines()[0]})") from None
    # A pooler belongs to a task of its family's own; without gradients it would be in the way of several ranks.
    if isinstance(getattr(backbone, "pooler", None), nn.Module):
        backbone.pooler = None
    missing = [name for name in info["missing_keys"] if not name.startswith("pooler.")]
    if missing:
        raise UserError(f"model {path}: its files lack {len(missing)} weights, e.g. {missing[0]}")
    return backbone
