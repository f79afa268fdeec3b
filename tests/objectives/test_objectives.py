"""From tokens to inputs and targets."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from biphasic.model.losses import IGNORE
from biphasic.objectives.targets import (
    BITS,
    Vocabulary,
    clm_targets,
    mlm_inputs_and_targets,
    random_integers,
    with_probability,
)

WORDS = Vocabulary(size=1000, mask_id=3, special_ids=(0, 1, 2, 3))
SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])


def rows_of(count: int, length: int = 256) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(4, 1000, (count, length), generator=torch.Generator().manual_seed(0))
    return tokens, torch.ones_like(tokens, dtype=torch.int32), torch.arange(count)


def test_clm_predicts_the_next_token_of_the_segment() -> None:
    tokens = torch.arange(12).reshape(2, 6)
    expected = [[1, 2, IGNORE, 4, IGNORE, IGNORE], [7, 8, 9, 10, 11, IGNORE]]
    assert clm_targets(tokens, SEGMENTS).tolist() == expected


@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.5])
def test_mlm_masks_the_given_share_and_predicts_only_masked_tokens(ratio: float) -> None:
    tokens, segments, rows = rows_of(400)
    inputs, targets = mlm_inputs_and_targets(tokens, segments, rows, WORDS, seed=1, counter=0, masking_ratio=ratio)
    masked = targets != IGNORE
    # 102,400 draws: five standard deviations are below 0.008.
    assert abs(masked.float().mean() - ratio) < 0.008
    assert (inputs[masked] == 3).all()
    assert torch.equal(targets[masked], tokens[masked])
    assert torch.equal(inputs[~masked], tokens[~masked])


def test_special_tokens_and_padding_are_never_masked() -> None:
    tokens, segments, rows = rows_of(50)
    tokens[:, ::3] = 1
    segments[:, -10:] = 0
    _, targets = mlm_inputs_and_targets(tokens, segments, rows, WORDS, seed=1, counter=0, masking_ratio=0.9)
    assert (targets[:, ::3] == IGNORE).all()
    assert (targets[:, -10:] == IGNORE).all()


def test_replacement_shares() -> None:
    tokens, segments, rows = rows_of(400)
    inputs, targets = mlm_inputs_and_targets(
        tokens, segments, rows, WORDS, seed=1, counter=0, masking_ratio=0.5, random_share=0.1, keep_share=0.1
    )
    chosen = targets != IGNORE
    assert abs((inputs == 3)[chosen].float().mean() - 0.8) < 0.01
    assert abs((inputs == tokens)[chosen].float().mean() - 0.1) < 0.01
    others = inputs[chosen & (inputs != 3) & (inputs != tokens)]
    assert abs(len(others) / chosen.sum() - 0.1) < 0.01
    assert others.min() >= 4
    assert others.unique().numel() > 900


@pytest.mark.parametrize(
    "numbers",
    [
        {"masking_ratio": 40},
        {"masking_ratio": float("nan")},
        {"random_share": 0.8, "keep_share": 0.5},
        {"keep_share": -0.1},
        {"target": "nxt"},
    ],
)
def test_numbers_that_are_no_shares_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        mlm_inputs_and_targets(*rows_of(2, 8), WORDS, seed=1, counter=0, **{"masking_ratio": 0.4, **numbers})
    mlm_inputs_and_targets(*rows_of(2, 8), WORDS, seed=1, counter=0, masking_ratio=1.0, random_share=0.9, keep_share=0.1)


def test_a_vocabulary_whose_ids_have_gaps() -> None:
    """Its size was the number of tokens, and the run ended at the switch."""
    words = {"a": 4, "b": 5, "[UNK]": 2, "[MASK]": 600, "[PAD]": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")), mask_token="[MASK]", pad_token="[PAD]"
    )
    vocabulary = Vocabulary.of(tokenizer)
    assert vocabulary == Vocabulary(size=601, mask_id=600, special_ids=(3, 600))
    inputs, _ = mlm_inputs_and_targets(
        *rows_of(20), vocabulary, seed=1, counter=0, masking_ratio=0.9, random_share=0.5, keep_share=0.1
    )
    assert inputs.max() < 1000 and (inputs == 600).any()
    tokenizer.add_tokens(["c"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["[X]"]})
    largest = max(tokenizer.get_vocab().values())
    assert Vocabulary.of(tokenizer).size == largest + 1 > len(tokenizer)


@pytest.mark.parametrize("ids", [(1000, (1,)), (3, (0, 1000)), (-1, (0,)), (3, (-1, 3))])
def test_ids_outside_of_the_vocabulary_are_refused(ids: tuple[int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"mask_id and special_ids: expected ids from 0 to size - 1 = 999; got (1000|-1)$"):
        Vocabulary(1000, *ids)


def test_next_target_is_predicted_one_position_before() -> None:
    tokens, segments, rows = rows_of(20, 64)
    segments[:, 30:] = 2
    inputs, targets = mlm_inputs_and_targets(
        tokens, segments, rows, WORDS, seed=1, counter=0, masking_ratio=0.4, target="next"
    )
    masked = inputs == 3
    assert not masked[:, 0].any()
    assert not masked[:, 30].any()
    assert torch.equal(targets[:, :-1] != IGNORE, masked[:, 1:])
    assert torch.equal(targets[:, :-1][masked[:, 1:]], tokens[:, 1:][masked[:, 1:]])
    assert (targets[:, -1] == IGNORE).all()


def test_masks_depend_on_seed_counter_row_and_position_only() -> None:
    tokens, segments, rows = rows_of(8)
    arguments = {"seed": 5, "counter": 2, "masking_ratio": 0.4}
    all_rows = mlm_inputs_and_targets(tokens, segments, rows, WORDS, **arguments)[0]
    order = torch.tensor([6, 1, 3])
    part = mlm_inputs_and_targets(tokens[order], segments[order], rows[order], WORDS, **arguments)[0]
    assert torch.equal(part, all_rows[order])
    for change in ({"seed": 6}, {"counter": 3}):
        other = mlm_inputs_and_targets(tokens, segments, rows, WORDS, **{**arguments, **change})[0]
        assert not torch.equal(other, all_rows)
    assert not torch.equal(mlm_inputs_and_targets(tokens, segments, rows + 1, WORDS, **arguments)[0], all_rows)


def test_random_integers_are_fixed_and_uniform() -> None:
    # Golden: another machine, another torch, must give the same masks, so that a resumed run is the same run.
    assert random_integers(42, 1, 0, torch.tensor([0, 7]), 3).tolist() == GOLDEN
    draws = random_integers(1, 1, 0, torch.arange(1000), 1000)
    assert draws.min() >= 0
    assert draws.max() < 1 << BITS
    share = draws.float() / (1 << BITS)
    assert abs(share.mean() - 0.5) < 0.002
    # Neighbouring rows and positions are uncorrelated.
    for a, b in ((share[1:], share[:-1]), (share[:, 1:], share[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.005
    assert abs(with_probability(draws, 0.3).float().mean() - 0.3) < 0.003


GOLDEN = [[1869292390, 1492701840, 779763677], [2297186077, 3920771214, 242905559]]
