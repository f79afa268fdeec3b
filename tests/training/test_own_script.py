"""The switch in a Composer script of one's own: around a Hugging Face decoder, or in a ComposerModel of one's own."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import DataSpec, Evaluator, Trainer
from composer.core import Algorithm, Callback, State
from composer.loggers import Logger
from composer.metrics.nlp import LanguageCrossEntropy
from composer.models import ComposerModel, HuggingFaceModel
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from biphasic import (
    CLM,
    MLM,
    Objective,
    ObjectiveSwitch,
    Ramp,
    Replacement,
    Vocabulary,
    WarmupStableDecay,
    clm_targets,
    cross_entropy_at_targets,
    mlm_inputs_and_targets,
    pack,
    packed_attention,
    step_of,
)
from biphasic.errors import UserError
from biphasic.objectives.batch import complete

WORDS, LENGTH, SEED = 40, 16, 17
PHASES: list[Objective] = [CLM(until="3ba"), MLM(masking_ratio=0.4)]
VOCABULARY = Vocabulary(WORDS, 1, (0, 1))


def tokenizer(mask: bool = True) -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<mask>": 1} | {f"w{index}": index for index in range(2, WORDS)}
    special = {"pad_token": "<pad>", **({"mask_token": "<mask>"} if mask else {})}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), **special)


def decoder(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=LENGTH, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def packed_rows(count: int = 24, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (count * 3,), generator=generator).tolist()
    return pack([torch.randint(2, WORDS, (length,), generator=generator).tolist() for length in lengths], LENGTH)[:count]


def train(
    rows: Sequence[Any],
    model: ComposerModel | None = None,
    phases: Sequence[Objective] = PHASES,
    microbatch: int = 8,
    batches: int = 6,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> tuple[dict[str, Tensor], Trainer]:
    """Train on batches of 8 rows, and return the weights."""
    model = HuggingFaceModel(decoder(), tokenizer=tokenizer()) if model is None else model
    loader = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    trainer = Trainer(
        model=model,
        train_dataloader=settings.pop("train_dataloader", loader),
        max_duration=f"{batches}ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=[
            ObjectiveSwitch(phases, tokenizer=tokenizer(), seed=SEED),
            WarmupStableDecay(warmup="1ba", decay="2ba", lr=0.5),
        ],
        callbacks=list(callbacks),
        device_train_microbatch_size=microbatch,
        device="cpu",
        progress_bar=False,
        **settings,
    )
    trainer.fit()
    trainer.close()
    return {name.removeprefix("model."): value.clone() for name, value in trainer.state.model.state_dict().items()}, trainer


class Losses(Callback):
    """Keeps the loss of each batch, and stops the run in the middle of one if asked to."""

    def __init__(self, stop_in: int | None = None) -> None:
        self.losses, self.stop_in = list[float](), stop_in

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.stop_in:
            raise KeyError("stopped")

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses.append((state.total_loss_dict or {})["loss/train/total"])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=2e-6) for name in one)


def dense_loss(model: LlamaForCausalLM, batch: dict[str, Any], batch_number: int, causal: bool) -> Tensor:
    """The mean over the targets, by the decoder's own attention with a mask of four dimensions."""
    tokens, segment_ids = batch["input_ids"], batch["segment_ids"]
    ids = complete(batch)["row_ids"]
    if causal:
        inputs, targets = tokens, clm_targets(tokens, segment_ids)
    else:
        inputs, targets = mlm_inputs_and_targets(
            tokens, segment_ids, ids, VOCABULARY, seed=SEED, counter=batch_number, masking_ratio=0.4
        )
    visible = segment_ids[:, :, None] == segment_ids[:, None]
    visible = visible.tril() if causal else visible
    starts = torch.ones_like(segment_ids)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    place = torch.arange(tokens.shape[1]).expand_as(tokens)
    positions = place - (place * starts).cummax(1).values
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[:, None]
    logits = model(input_ids=inputs, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_the_loss_is_the_mean_over_targets_in_the_phase_s_direction() -> None:
    """Each batch's loss, by the decoder's own attention with explicit masks, and training with its gradients."""
    rows, recorded = packed_rows(), Losses()
    weights, _ = train(rows, batches=3, phases=[CLM(until="2ba"), MLM()], callbacks=[recorded])
    model, rates = decoder(), [0.0, 0.5, 0.25]
    expected = []
    for number, (batch, rate) in enumerate(zip(DataLoader(rows, batch_size=8), rates, strict=True)):  # pyright: ignore
        loss = dense_loss(model, batch, number, causal=number < 2)
        expected.append(float(loss))
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= rate * parameter.grad
                parameter.grad = None
    assert recorded.losses == pytest.approx(expected, rel=1e-5)
    assert same(weights, dict(model.state_dict()))


def test_microbatches_of_any_size_train_the_same_model() -> None:
    whole, _ = train(packed_rows())
    for size in (1, 3):
        assert same(whole, train(packed_rows(), microbatch=size)[0])


def test_position_ids_and_attention_masks_say_the_same_as_segment_ids() -> None:
    rows = packed_rows()
    expected, _ = train(rows)
    described = []
    for row in rows:
        counts = [int((row["segment_ids"] == index).sum()) for index in range(1, int(row["segment_ids"].max()) + 1)]
        padding = LENGTH - sum(counts)
        positions = torch.tensor([place for count in (*counts, padding) for place in range(count)])
        described.append(
            {"input_ids": row["input_ids"], "position_ids": positions, "attention_mask": row["segment_ids"] > 0}
        )
    assert same(expected, train(described)[0])


@pytest.mark.parametrize(
    ("positions", "mask", "segments"),
    [
        ([2, 3, 4, 5, 6, 7], None, [1, 1, 1, 1, 1, 1]),  # RoBERTa's
        ([7, 8, 9, 0, 1, 0], None, [1, 1, 1, 2, 2, 3]),  # a document that goes on
        ([0, 1, 2, 2, 3, 4], None, [1, 1, 1, 2, 2, 2]),
        ([5, 6, 7, 5, 6, 7], None, [1, 1, 1, 2, 2, 2]),
        ([1, 1, 2, 3, 2, 3], [0, 0, 1, 1, 1, 1], [0, 0, 2, 2, 3, 3]),  # RoBERTa's, padded on the left
        ([2, 3, 2, 3, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 2, 2, 0, 0]),
    ],
)
def test_a_segment_begins_where_positions_don_t_go_on(positions: list[int], mask: Any, segments: list[int]) -> None:
    batch = {"input_ids": torch.arange(12).view(2, 6), "position_ids": torch.tensor([positions, [*range(6)]])}
    if mask is not None:
        batch["attention_mask"] = torch.tensor([mask, [1] * 6])
    assert complete(batch)["segment_ids"].tolist() == [segments, [1] * 6]
    assert complete({**batch, "position_ids": torch.arange(6)[None] + 2})["segment_ids"].max() == 1


def test_segments_counted_from_0_are_refused() -> None:
    """Their first document would be padding. Padding on the left, which repeats a token, is not refused."""
    tokens, ids = torch.arange(12).view(2, 6), torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 1]])
    batch = {"input_ids": tokens, "segment_ids": ids}
    for wrong in (batch, {**batch, "attention_mask": torch.ones_like(ids)}):
        refuse("segment_ids: expected numbers from 1 on", lambda wrong=wrong: complete(wrong), ValueError)
    # A validation repeats rows, as padding, until each rank has the same number.
    for usual in ({"input_ids": tokens.where(ids > 0, 3)}, {"attention_mask": (ids > 0).long()}, {"segment_ids": ids * 0}):
        complete({**batch, **usual})
    starting = {**batch, "segment_ids": ids + torch.tensor([[1], [0]])}
    assert complete(starting)["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 3], [0, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_neither_target_nor_attended_to(side: str) -> None:
    def rows(pad: int) -> list[dict[str, Tensor]]:
        made, generator = [], torch.Generator().manual_seed(2)
        for length in torch.randint(3, LENGTH, (24,), generator=generator).tolist():
            ids, rest = torch.randint(2, WORDS, (length,), generator=generator), torch.full((LENGTH - length,), pad)
            mask = torch.ones_like(ids), torch.zeros_like(rest)
            order = (1, 0) if side == "left" else (0, 1)
            made.append({
                "input_ids": torch.cat([(ids, rest)[index] for index in order]),
                "attention_mask": torch.cat([mask[index] for index in order]),
                "row_ids": torch.tensor(len(made)),
            })  # fmt: skip
        return made

    assert same(train(rows(0))[0], train(rows(7))[0])


@pytest.mark.parametrize("stop_in", [2, 3, 4])
def test_a_run_that_was_stopped_resumes_as_one_that_was_not(tmp_path: Path, stop_in: int) -> None:
    """Batch 3 is the first after the switch. Composer's own autoresume."""
    phases = [CLM(until="3ba"), MLM(masking_ratio=0.4, reset_optimizer=True)]
    whole, every = Losses(), Losses()
    keys: dict[str, Any] = {"save_interval": "1ba", "autoresume": True, "run_name": "run", "phases": phases}
    expected, _ = train(packed_rows(48), callbacks=[whole], save_folder=str(tmp_path / "whole"), **keys)
    with pytest.raises(KeyError):
        train(packed_rows(48), callbacks=[Losses(stop_in)], save_folder=str(tmp_path / "cut"), **keys)
    resumed, _ = train(packed_rows(48), callbacks=[every], save_folder=str(tmp_path / "cut"), **keys)
    assert every.losses == whole.losses[stop_in:]
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


class OwnModel(ComposerModel):
    """A network of one's own, which reads the direction, the labels and the mean from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
        self.directions = list[bool]()

    def forward(self, batch: Any) -> Tensor:
        hidden, causal = self.embedding(batch["input_ids"]), step_of(batch).causal
        self.directions.append(causal)
        visible = batch["segment_ids"][:, :, None] == batch["segment_ids"][:, None]
        visible = visible.tril() if causal else visible
        hidden = hidden + visible.float() @ hidden / LENGTH
        return cross_entropy_at_targets(hidden, self.head.weight, batch["labels"])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return step_of(batch).mean_loss(outputs, len(batch["labels"]))


def test_a_composer_model_of_one_s_own() -> None:
    def trained(microbatch: int) -> tuple[dict[str, Tensor], list[bool]]:
        torch.manual_seed(0)
        model = OwnModel()
        return train(packed_rows(), model, microbatch=microbatch)[0], model.directions

    weights, directions = trained(8)
    assert directions == [True] * 3 + [False] * 3
    assert same(weights, trained(2)[0])


def test_validation_has_an_evaluator_s_objective_by_its_label() -> None:
    """With Composer's own metric, whose labels are aligned with the logits."""
    network = decoder()
    model = HuggingFaceModel(network, tokenizer(), metrics=[LanguageCrossEntropy()], use_logits=True)
    rows = packed_rows()
    evaluators = [
        Evaluator(label=label, dataloader=DataLoader(rows, batch_size=8), metric_names=["LanguageCrossEntropy"])  # pyright: ignore
        for label in ("clm", "mlm")
    ]
    _, trainer = train(rows, model, batches=4, eval_dataloader=evaluators, eval_interval="4ba", microbatch=4)
    network.set_attn_implementation("sdpa")
    values = {
        label: float(metrics["LanguageCrossEntropy"].compute()) for label, metrics in trainer.state.eval_metrics.items()
    }
    batch = next(iter(DataLoader(rows, batch_size=len(rows))))  # pyright: ignore
    with torch.no_grad():
        expected = {label: float(dense_loss(network, batch, 0, label == "clm")) for label in ("clm", "mlm")}
    assert values == pytest.approx(expected, rel=1e-5)
    assert values["clm"] != pytest.approx(values["mlm"], rel=1e-3)


def test_weights_of_microbatches_that_are_not_their_rows_are_refused() -> None:
    def tokens(batch: Any) -> dict[str, int]:
        count = int((batch["segment_ids"] > 0).sum())
        return {"total": count, "loss_generating": count * (1 + int(batch["input_ids"][0, 0]))}

    data = DataSpec(DataLoader(packed_rows(), batch_size=8), get_num_tokens_in_batch=tokens)  # pyright: ignore
    with pytest.raises(UserError, match=r"set Trainer\(accumulate_train_batch_on_tokens=False\)"):
        train([], train_dataloader=data, microbatch=2, accumulate_train_batch_on_tokens=True)
    # Composer's default counts are proportional to the rows.
    assert same(train(packed_rows())[0], train(packed_rows(), microbatch=2, accumulate_train_batch_on_tokens=True)[0])


def test_a_copy_of_a_trained_model_computes_its_own_weights() -> None:
    """A copy of the network, such as `AveragedModel` makes, and trained on in another `HuggingFaceModel`."""
    trained: Any = train(packed_rows(), batches=4)[1].state.model.model
    copies = [copy.deepcopy(trained), torch.optim.swa_utils.AveragedModel(trained).module]
    expected, _ = train(packed_rows(), HuggingFaceModel(trained, tokenizer=tokenizer()))
    for network in copies:
        before = {name: weight.clone() for name, weight in trained.state_dict().items()}
        assert same(train(packed_rows(), HuggingFaceModel(network, tokenizer=tokenizer()))[0], expected)  # pyright: ignore
        assert all(torch.equal(weight, before[name]) for name, weight in trained.state_dict().items())
        network.set_attn_implementation("sdpa")  # pyright: ignore
        assert network(torch.tensor([[5, 6]])).logits.shape == (1, 2, WORDS)


def test_the_whole_model_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **keys: compile_with(model, backend="eager", **keys))
    expected, _ = train(packed_rows())
    weights, _ = train(packed_rows(), compile_config={})
    assert same({name.removeprefix("_orig_mod."): weight for name, weight in weights.items()}, expected)


def row_lengths(row: dict[str, Tensor]) -> list[int]:
    ids = row["segment_ids"]
    return torch.unique_consecutive(ids[ids > 0], return_counts=True)[1].tolist()


def test_lengths_give_the_segments() -> None:
    batch = next(iter(DataLoader(packed_rows(), batch_size=8)))  # pyright: ignore
    lengths = [row_lengths(row) for row in packed_rows()[:8]]
    tokens, ids = batch["input_ids"], batch["segment_ids"]
    for given in (lengths, [torch.tensor(row).numpy() for row in lengths]):
        assert torch.equal(complete({"input_ids": tokens, "lengths": given})["segment_ids"], ids)
    kept = complete({"input_ids": tokens, "lengths": lengths, "attention_mask": torch.arange(LENGTH).expand(8, -1) < 9})
    assert torch.equal(kept["segment_ids"], ids * (torch.arange(LENGTH) < 9))
    assert [sum(row[: int(own.max())]) for row, own in zip(kept["lengths"], kept["segment_ids"], strict=True)] == [
        int((own > 0).sum()) for own in kept["segment_ids"]
    ]
    for wrong in (torch.tensor([LENGTH] * 8), [[LENGTH, 1]] * 8, [[3, 0]] * 8, [[3]] * 7, [[2.5]] * 8):
        refuse("lengths: expected for each of 8 rows", lambda wrong=wrong: complete({**batch, "lengths": wrong}), ValueError)


def test_labels_and_masks_that_would_be_ignored_are_refused() -> None:
    batch = next(iter(DataLoader(packed_rows(), batch_size=8)))  # pyright: ignore
    tokens, ids = batch["input_ids"], batch["segment_ids"]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    usual = [
        tokens,
        tokens.where(ids > 0, -100),
        tokens.where(~begins, -100),
        tokens.where(tokens != 5, -100),
        torch.ones(8),
    ]
    assert all(complete({**batch, "labels": labels}, (5,)) for labels in usual)
    prompt = tokens.where(torch.arange(LENGTH) > 4, -100)
    for inputs, labels in ((tokens, prompt), (tokens, usual[3]), (tokens.masked_fill(tokens < 9, 1), tokens)):
        wrong = {**batch, "input_ids": inputs, "labels": labels}
        refuse("`labels` that differ from `input_ids`", lambda wrong=wrong: complete(wrong, (1,)))
    refuse(
        "labels",
        lambda: train([{**row, "labels": row["input_ids"].where(row["input_ids"] > 20, -100)} for row in packed_rows()]),
    )
    for mask in (ids, (ids > 0)[:, None, None]):
        refuse(
            "attention_mask: expected 1 at",
            lambda mask=mask: complete({"input_ids": tokens, "attention_mask": mask}),
            ValueError,
        )
    assert torch.equal(complete({"input_ids": tokens, "attention_mask": ids > 0})["segment_ids"], (ids > 0).long())


def refuse(message: str, call: Callable[[], object], kind: type[Exception] = UserError) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_what_can_t_be_trained_is_refused_in_one_line() -> None:
    refuse("`until` in each phase but the last", lambda: ObjectiveSwitch([CLM(), MLM()], tokenizer(), 0))
    refuse("`until` in each phase but the last", lambda: ObjectiveSwitch([CLM(until="3ba")], tokenizer(), 0))
    refuse("the tokenizer has no mask token", lambda: ObjectiveSwitch(PHASES, tokenizer(mask=False), 0), ValueError)
    refuse("expected a number and a unit", lambda: WarmupStableDecay("20", "0ba", 1e-3), ValueError)
    refuse("masking_ratio: expected", lambda: MLM(masking_ratio=1.5), ValueError)
    refuse("phase 1 begins at 9ba and ends at 6ba", lambda: train(packed_rows(), phases=[CLM(until="9ba"), MLM()]))
    ramp = MLM(masking_ratio=Ramp(0.5, 0.1))
    for until, duration in (("3ba", "2ep"), ("1ep", "2ep")):
        switch = ObjectiveSwitch([CLM(until=until), ramp], tokenizer(), 0)
        refuse("phase 1: a ramp needs", lambda switch=switch, end=duration: train_with(switch, duration=end, fit=False))
    refuse(
        "phase 1 begins at 9ba", lambda: train_with(ObjectiveSwitch([CLM(until="9ba"), MLM()], tokenizer(), 0), fit=False)
    )
    for shares in ({"mask": 0.8}, {"mask": 0.8, "random": 0.5, "keep": 0.5}, {"random": -0.5, "keep": 0.5}):
        refuse("mask, random and keep: expected shares that add up to 1", lambda own=shares: Replacement(**own), ValueError)
    groups = [{"params": [torch.ones(2)], "lr": 1e-5}, {"params": [torch.ones(2)]}]
    layerwise = torch.optim.AdamW(groups, lr=1e-3)
    refuse("rates 1e-05, 0.001, .* 'lr_scale': 0.1", lambda: train_with(WarmupStableDecay(), layerwise))
    groups = [{"params": [torch.ones(2)], "lr": 1e-5, "lr_scale": 0.1}, {"params": [torch.ones(2)]}]
    train_with(WarmupStableDecay(lr=1e-2), scaled := torch.optim.AdamW(groups, lr=1e-3))
    assert [group["lr"] for group in scaled.param_groups] == pytest.approx([1e-3, 1e-2])
    refuse("dictionaries with `input_ids`", lambda: train([torch.ones(4)] * 8), ValueError)
    words, network = Vocabulary(WORDS + 3, WORDS + 2, (0, WORDS + 2)), HuggingFaceModel(decoder(), tokenizer=tokenizer())
    refuse("at least 43 rows, .*; got 40: ", lambda: Trainer(model=network, algorithms=[ObjectiveSwitch(PHASES, words, 0)]))
    padding = [{**row, "attention_mask": torch.zeros(LENGTH)} for row in packed_rows()]
    refuse("the first batch of clm has none", lambda: train(padding))
    refuse("decay: expected the unit of max_duration", lambda: train_with(WarmupStableDecay("0ba", "8tok", 1e-3)))


def test_segments_whose_positions_would_depend_on_others_are_refused() -> None:
    """transformers chooses dynamic frequencies by the longest position of a call, in which all segments are."""
    config = decoder().config
    config.max_position_embeddings = 8
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    model = LlamaForCausalLM(copy.deepcopy(config))
    refuse(
        "a segment has .* tokens, but .*dynamic.* of 8 tokens",
        lambda: train(packed_rows(), HuggingFaceModel(model, tokenizer())),
    )
    forward, tokens = packed_attention(LlamaForCausalLM(copy.deepcopy(config))), torch.randint(2, WORDS, (1, 17))
    for padding in (1, 9):  # which may be longer
        alone, padded = tokens[:, : 17 - padding], torch.tensor([[1] * 8 + [2] * (9 - padding) + [0] * padding])
        hidden = forward(tokens, padded, True)[:, : 17 - padding]
        assert torch.allclose(hidden, forward(alone, padded[:, : 17 - padding], True), atol=1e-6)
    masks = [{"input_ids": row["input_ids"], "attention_mask": (torch.arange(LENGTH) < 4).long()} for row in packed_rows()]
    train(masks, HuggingFaceModel(LlamaForCausalLM(copy.deepcopy(config)), tokenizer()))
    refuse("a segment has 9 tokens", lambda: forward(tokens, torch.tensor([[1] * 8 + [2] * 9]), True))


def train_with(algorithm: Algorithm, optimizer: Any = None, duration: str = "2ba", fit: bool = True) -> None:
    model = HuggingFaceModel(decoder(), tokenizer=tokenizer())
    loader = DataLoader(packed_rows(), batch_size=8)  # pyright: ignore[reportArgumentType]
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    algorithms = [*([] if isinstance(algorithm, ObjectiveSwitch) else [ObjectiveSwitch([MLM()], tokenizer(), 0)]), algorithm]
    trainer = Trainer(model=model, train_dataloader=loader, max_duration=duration, optimizers=optimizer,
                      algorithms=algorithms, device="cpu", progress_bar=False)  # fmt: skip
    if fit:
        trainer.fit()


TWO_RANKS = """
import json, sys
import torch
from composer.utils import dist
from torch.utils.data import DataLoader, Subset
from training.test_own_script import Losses, packed_rows, train
from composer import DataSpec

dist.initialize_dist("cpu")
# Batches of 8 rows are divided unevenly in targets, and the ranks take rows in turn.
rows = [row for number, row in enumerate(packed_rows()) if number % 2 == dist.get_global_rank()]
recorded = Losses()
sampler = torch.utils.data.DistributedSampler(rows, num_replicas=1, rank=0, shuffle=False)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
weights, _ = train(rows, train_dataloader=loader, microbatch=2, callbacks=[recorded])
if dist.get_global_rank() == 0:
    weights = {name.removeprefix("module.").removeprefix("model."): value for name, value in weights.items()}
    torch.save((weights, recorded.losses), sys.argv[1])
"""


def test_two_ranks_train_the_same_model(tmp_path: Path) -> None:
    recorded = Losses()
    expected, _ = train(packed_rows(), callbacks=[recorded])
    script = tmp_path / "two_ranks.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{TWO_RANKS}")
    command = [sys.executable, "-m", "composer.cli", "-n", "2", str(script), str(tmp_path / "out.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    weights, losses = torch.load(tmp_path / "out.pt")
    assert losses == pytest.approx(recorded.losses, rel=1e-5)
    assert same(expected, weights), json.dumps([*weights])
