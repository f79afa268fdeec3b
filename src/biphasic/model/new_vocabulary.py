"""Fit a loaded model's embedding and head to the tokenizer of the data (`model.new_vocabulary`)."""

from collections import Counter

import torch
import yaml
from torch import Tensor
from torch.nn.functional import embedding_bag

from biphasic.data.same_vocabulary import vocabulary_problem
from biphasic.data.tokenizer import Tokenizer, TokenTexts, load_tokenizer
from biphasic.errors import UserError
from biphasic.model.checkpoint import is_checkpoint, read_record
from biphasic.model.language_model import LanguageModel
from biphasic.ranks import is_first_rank


def fit_vocabulary(model: LanguageModel, place: str, new: Tokenizer, *, rebuild: bool) -> None:
    """Rebuild embedding and head of the model from `place` for a new tokenizer with `rebuild`, else enlarge them.

    Raises a UserError if `new_vocabulary` is missing or not needed, or is given and the model's tokenizer can't be read.
    """
    source = yaml.safe_load(read_record(place)["config"])["tokenizer"] if is_checkpoint(place) else place
    try:
        old = load_tokenizer(source)
    except UserError as error:
        if rebuild:
            raise UserError(f"model.new_vocabulary: needs the tokenizer of {place}: {error}") from None
        old = new  # can't be compared
    if (problem := vocabulary_problem(place, old, new, rebuild=rebuild)) is not None:
        raise UserError(problem)
    if rebuild:
        _rebuild(model, old, new)
    rows = model.lm_head.out_features
    if rows < new.vocab_size and is_first_rank():
        print(f"model.init_from: its {rows:,} tokens become {new.vocab_size:,}, the new ones with the mean of all vectors")
    model.resize_token_embeddings(new.vocab_size)


def _rebuild(model: LanguageModel, old: Tokenizer, new: Tokenizer) -> None:
    rows, olds, news = model.lm_head.out_features, TokenTexts(old), TokenTexts(new)
    # A special token is that of the same role, or else of the same name.
    special = {number: old.tokenizer.token_to_id(str(new.tokenizer.id_to_token(number))) for number in new.special_ids}
    special |= {number: olds.roles[role] for role, number in news.roles.items() if olds.roles[role] is not None}
    sources, counts = list[list[int]](), Counter[str]()
    for token_id, text in enumerate(news.texts):
        same = olds.ids.get(text) if text else special.get(token_id)
        pieces = [piece for piece in (olds.split(text) if same is None else [same]) if piece < rows]
        counts["all" if not pieces else "pieces" if same is None else "same"] += 1
        sources.append(pieces)
    lengths = torch.tensor([len(pieces) for pieces in sources])
    flat = torch.tensor([piece for pieces in sources for piece in pieces], dtype=torch.int64)

    def rebuilt(weight: Tensor) -> Tensor:
        table = weight.reshape(rows, -1)
        means = embedding_bag(flat, table, lengths.cumsum(0) - lengths, mode="mean")
        means[lengths == 0] = table[: old.vocab_size].mean(0)
        return means.reshape(-1, *weight.shape[1:])

    model.map_vocabulary(rebuilt)
    for role, token_id in {**new.role_ids, "cls": new.bos_id, "sep": new.eos_id}.items():
        if hasattr(model.config, f"{role}_token_id"):
            setattr(model.config, f"{role}_token_id", token_id)
    if is_first_rank():
        pieces = f"{counts['pieces']:,} have the mean of their pieces' in {old.source}"
        means = f"{pieces}, {counts['all']:,} the mean of all"
        print(f"model.new_vocabulary: {counts['same']:,} tokens keep their vectors, {means}")
