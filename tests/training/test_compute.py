"""The YAML's `compute:` section: choices, refusals, and equal losses."""

import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Event, State
from composer.loggers import Logger

from biphasic.config.pretrain import MAX_AUTOTUNE, ComputeConfig
from biphasic.data.streams import StreamRecord
from biphasic.durations import BatchShape
from biphasic.errors import Unavailable, UserError
from biphasic.model import attention, layers
from biphasic.model.architecture import PRESETS
from biphasic.model.auto_microbatch import even_microbatch, largest_microbatch, peak_bytes
from biphasic.model.language_model import from_hf_config, llama_config
from biphasic.objectives.batch import Batch, step_of
from biphasic.training import compute
from biphasic.training.compute import configure_compute
from biphasic.training.step import PretrainModel
from conftest import Write
from helpers import attention_on_cpu  # noqa: F401 - kernels for CPUs
from helpers.decoders import saved_decoder
from helpers.tiny import config_of, losses, train


def meta() -> Any:
    return from_hf_config(llama_config(PRESETS["210m"], 2048), seed=0, device="meta")


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_a_backend_that_needs_a_gpu_is_refused(backend: Any) -> None:
    with pytest.raises(UserError, match=rf"compute\.attention: {backend} needs a GPU: choose another backend, or auto"):
        configure_compute(meta(), ComputeConfig(attention=backend), "fp32")


@pytest.mark.parametrize(
    ("requested", "gpu", "expected"),
    [
        ({}, False, "layers and loss not compiled, attention sdpa"),
        ({}, True, "layers and loss compiled, attention varlen (cuDNN)"),
        ({"attention": "varlen", "compile": False}, True, "layers and loss not compiled, attention varlen (cuDNN)"),
        ({"attention": "flex"}, True, "layers and loss compiled, attention flex"),
        (
            {"activation_checkpointing": 5},
            False,
            "layers and loss not compiled (2 of 12 layers recomputed), attention sdpa",
        ),
        (
            {"compile": MAX_AUTOTUNE, "residual": "bf16", "activation_checkpointing": "all"},
            False,
            f"layers and loss compiled ({MAX_AUTOTUNE}, bf16 residual, 12 of 12 layers recomputed), attention sdpa",
        ),
    ],
)
def test_the_choice_is_described(
    requested: dict[str, Any], gpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(attention, "backend_available", lambda backend: True)
    monkeypatch.setattr(compute, "select_kernels", lambda hf_config, requested: "cuDNN")
    model = meta()
    assert configure_compute(model, ComputeConfig(**requested), "amp_bf16") == expected
    assert model.compiled_loss == (" compiled" in expected and "not compiled" not in expected)


def test_kernels_without_effect_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"compute\.varlen_kernels: fa2 has no effect, .* sdpa with this model, precision: fp32"
    ):
        configure_compute(meta(), ComputeConfig(varlen_kernels="fa2"), "fp32")


def test_a_deterministic_run(write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    plain = losses(train(config_of(write_yaml("plain", checkpoint__interval="100ba"))))
    path = write_yaml("deterministic", checkpoint__interval="100ba", compute__deterministic=True)
    try:
        assert losses(train(config_of(path))) == plain
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize(("setting", "layers"), [("none", []), ("all", [0, 1, 2, 3]), (2, [1, 3]), (3, [2])])
def test_recomputed_layers(setting: Any, layers: list[int]) -> None:
    assert ComputeConfig(activation_checkpointing=setting).recomputed(4) == layers


@pytest.mark.slow
def test_a_compiled_run_with_recomputed_layers_has_the_same_losses(
    write_yaml: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve batches with the switch, eight rows in microbatches of four, through the trainer and the real compiler."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    keys: dict[str, Any] = {"checkpoint__interval": "100ba"}
    plain = losses(train(config_of(write_yaml("plain", **keys))))
    monkeypatch.setattr(attention, "backend_available", lambda backend: True)
    counters.clear()
    changed = {"attention": "varlen", "compile": True, "activation_checkpointing": 2}
    compiled = losses(train(config_of(write_yaml("compiled", **keys, compute=changed))))
    assert len(plain) == len(compiled) == 12
    assert all(math.isclose(one, other, abs_tol=1e-4) for one, other in zip(plain, compiled, strict=True))
    # A layer in either phase, the norm, the loss. Eager runs have none.
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.parametrize("most", [1, 2, 6, 12, 48, 96, 288])
@pytest.mark.parametrize(("fixed", "row"), [(1.0, 0.4), (5.0, 2.3), (20.0, 0.11), (20.0, 28.2), (60.0, 30.0), (3.0, 90.0)])
def test_few_measurements_find_the_largest_microbatch(most: int, fixed: float, row: float) -> None:
    """Memory is a line, with a little more at the first rows; beyond the device's 140 nothing fits."""
    room, calls = 131.0, []

    def measure(rows: int) -> float | None:
        calls.append(rows)
        peak = fixed + row * rows + 0.5 * min(rows, 3)
        return peak if peak < 140 else None

    rows_found = largest_microbatch(measure, most, room)
    best = max(rows for rows in range(1, most + 1) if (measure(rows) or math.inf) <= room)
    del calls[-most:]
    assert 0.9 * best - 1 <= rows_found <= best
    assert len(calls) <= 6


def test_no_row_fits() -> None:
    with pytest.raises(UserError, match=r"microbatch_size: not one row fits this GPU's memory"):
        largest_microbatch(lambda rows: None, 8, 100.0)
    with pytest.raises(UserError, match="not one row fits"):
        largest_microbatch(lambda rows: 120.0, 8, 100.0)


@pytest.mark.parametrize(("most", "fit", "rows"), [(12, 12, 12), (12, 11, 6), (12, 5, 4), (7, 3, 3), (1, 1, 1), (6, 9, 6)])
def test_microbatches_are_even(most: int, fit: int, rows: int) -> None:
    assert even_microbatch(most, fit) == rows


def test_a_microbatch_is_measured_once_for_the_same_circumstances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    place = tmp_path / "checkpoints"
    measure_by_formula(monkeypatch, measured)
    monkeypatch.setattr(compute.MicrobatchSize, "_train", lambda self, state, length, rows, causal: measured.append(rows))

    def find(**circumstances: int) -> int:
        monkeypatch.setattr(compute, "_circumstances", lambda length, rows: circumstances)
        inputs: Any = [SimpleNamespace(shape=BatchShape(12, 8))]
        model = SimpleNamespace(model=SimpleNamespace(compiled_loss=False))
        state: Any = SimpleNamespace(fsdp_config=None, evaluators=[], model=model)
        compute.MicrobatchSize("auto", inputs, [True], str(place), {}).apply(Event.FIT_START, state, Logger(state))
        return state.device_train_microbatch_size

    assert find(length=8) == 4
    first = len(measured)
    assert find(length=8) == 4 and len(measured) == first
    assert find(length=9) == 4 and len(measured) == 2 * first
    (place / compute.MICROBATCH_FILE.format(length=8)).write_text('{"circumstances"')
    assert find(length=9) == 4 and len(measured) == 3 * first
    # A result that can't be stored doesn't end the run.
    shutil.rmtree(place)
    place.touch()
    assert find(length=9) == 4 and len(measured) == 4 * first


def measure_by_formula(monkeypatch: pytest.MonkeyPatch, rows: list[int]) -> None:
    """Memory is a formula instead of a GPU's: four rows fit. `rows` are those measured, the last one at the end."""
    monkeypatch.setattr(compute, "_circumstances", lambda length, rows: {})
    monkeypatch.setattr(compute, "_missing_optimizer_state", lambda state: 1.0)
    monkeypatch.setattr(compute, "available_bytes", lambda: 10.0)
    monkeypatch.setattr(compute, "peak_bytes", lambda work: work() or 2.0 * rows[-1])
    monkeypatch.setattr(compute, "_is_measured", lambda size: size == "auto")


def test_an_automatic_microbatch_trains_the_same_run(write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = losses(train(config_of(write_yaml("fixed", microbatch_size=4))))
    rows: list[int] = []
    fill = compute.MicrobatchSize._batch

    def record(self: compute.MicrobatchSize, state: State, length: int, count: int, causal: bool) -> Batch:
        rows.append(count)
        return fill(self, state, length, count, causal)

    monkeypatch.setattr(compute.MicrobatchSize, "_batch", record)
    measure_by_formula(monkeypatch, rows)
    folder = train(config_of(write_yaml("measured", microbatch_size="auto")))
    assert set(rows) == {1, 4}
    assert losses(folder) == expected


def test_a_microbatch_that_ran_out_of_memory_is_smaller_at_the_next_start(
    write_yaml: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine too, which has only what is stored with the checkpoints."""
    rows: list[int] = []
    trained: list[int] = []
    fill, forward, fails = compute.MicrobatchSize._batch, PretrainModel.forward, True

    def record(self: compute.MicrobatchSize, state: State, length: int, count: int, causal: bool) -> Batch:
        rows.append(count)
        return fill(self, state, length, count, causal)

    def fill_memory(self: PretrainModel, batch: Batch) -> Any:
        if step_of(batch).phase is not None:
            trained.append(len(batch["lengths"]))
            if fails and len(trained) > 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(self, batch)

    monkeypatch.setattr(compute.MicrobatchSize, "_batch", record)
    monkeypatch.setattr(PretrainModel, "forward", fill_memory)
    measure_by_formula(monkeypatch, rows)
    config = config_of(write_yaml("full", microbatch_size="auto", checkpoint__folder=str(tmp_path / "place")))
    message = r"microbatch_size: auto: a GPU ran out of memory in batch 2 with microbatches of 4 rows: the next start"
    with pytest.raises(Unavailable, match=message):
        train(config)
    assert set(trained) == {4}
    fails = False
    trained.clear()
    shutil.rmtree(config.run_folder)
    train(config)
    assert max(trained) == 3
    # A number in the YAML isn't changed.
    fails = True
    trained.clear()
    with pytest.raises(UserError, match="with microbatches of 4 rows: set a smaller number") as caught:
        train(config_of(write_yaml("fixed", microbatch_size=4)))
    assert not isinstance(caught.value, Unavailable)


@pytest.mark.parametrize(
    ("message", "is_full"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be reported later", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("Caught RuntimeError in pin memory thread for device 0.\nRuntimeError: CUDA error: out of memory", False),
    ],
)
def test_a_full_gpu_is_known_by_its_errors(message: str, is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        raise RuntimeError(message)

    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    if is_full:
        assert peak_bytes(work) is None
    else:
        with pytest.raises(RuntimeError):
            peak_bytes(work)


def test_the_measured_rows_have_as_many_segments_as_the_data() -> None:
    """The mean of 2.5 documents, a quarter more, and padding; in the phase whose rows they are, and at most a token each."""
    state: Any = SimpleNamespace(device=SimpleNamespace(tensor_to_device=lambda tensor: tensor))
    phases = [(10, "data.train"), (12, "objective.phases.1.data.train"), (4, "objective.phases.2.data.train")]
    inputs: Any = [SimpleNamespace(shape=BatchShape(2, length), streams={key: None}) for length, key in phases]
    split = {"documents": 5, "rows": 2, "tokens": 20}
    records = {key: StreamRecord("", {}, split) for key in ("data.train", "objective.phases.2.data.train")}
    records["objective.phases.2.data.train"] = StreamRecord("", {}, {**split, "documents": 50})
    size = compute.MicrobatchSize("auto", inputs, [True] * 3, "", {}, records)
    assert size._batch(state, 10, 2, True)["lengths"] == [[2, 2, 2, 2, 2]] * 2
    assert size._batch(state, 12, 1, True)["lengths"] == [[12]]
    assert size._batch(state, 4, 1, True)["lengths"] == [[1, 1, 1, 1]]


def test_the_measurement_computes_as_in_training(write_yaml: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers loads a backbone in evaluation mode, in which layers are not recomputed and nothing is dropped."""
    saved_decoder("llama", tmp_path / "hub", attention_dropout=0.1)
    rows: list[int] = []
    recomputed: list[object] = []
    fill, apply = compute.MicrobatchSize._batch, compute.MicrobatchSize.apply
    checkpoint: Any = layers.checkpoint

    def record(self: compute.MicrobatchSize, state: State, length: int, count: int, causal: bool) -> Batch:
        rows.append(count)
        assert all(module.training for module in state.model.modules()) and torch.is_grad_enabled()
        return fill(self, state, length, count, causal)

    def recompute(forward: Any, *inputs: Any, **named: Any) -> Any:
        recomputed.append(forward)
        return checkpoint(forward, *inputs, **named)

    def compare(self: compute.MicrobatchSize, event: Event, state: State, logger: Logger) -> None:
        if event == Event.BATCH_START:
            return apply(self, event, state, logger)
        numbers = torch.get_rng_state()
        assert not all(module.training for module in state.model.modules())
        apply(self, event, state, logger)
        assert torch.equal(torch.get_rng_state(), numbers)
        assert len(recomputed) == 2 * len(rows) > 0  # two layers

    monkeypatch.setattr(layers, "checkpoint", recompute)
    monkeypatch.setattr(compute.MicrobatchSize, "_batch", record)
    monkeypatch.setattr(compute.MicrobatchSize, "apply", compare)
    measure_by_formula(monkeypatch, rows)
    path = write_yaml("measured", microbatch_size="auto", model={"init_from": str(tmp_path / "hub")},
                      compute__activation_checkpointing="all")  # fmt: skip
    train(config_of(path))
    assert set(rows) == {1, 4}


def test_no_measurement_of_sharded_ranks_runs_out_of_memory() -> None:
    """The first row adds 30 to 50, so that three rows surely fit into 140; then the line through both is exact."""
    measured = list[int]()

    def measure(rows: int) -> float:
        measured.append(rows)
        return 60.0 + 20.0 * rows

    assert largest_microbatch(measure, 8, 145.0, before=50.0) == 4 and measured == [1, 3, 4]
    measured.clear()
    assert largest_microbatch(measure, 8, 95.0, before=50.0) == 1 and measured == [1]


@pytest.mark.parametrize(
    ("backend", "changes", "precision", "option"),
    [
        ("varlen", {}, "fp32", "fp32"),
        ("varlen", {"attn_logit_softcapping": 50.0}, "amp_bf16", "softcapped scores"),
        ("flex", {"attention_dropout": 0.1}, "amp_bf16", "dropout of attention weights"),
        ("varlen", {"head_dim": 26}, "amp_bf16", "heads whose size is not a multiple of 8"),
    ],
)
def test_a_backend_that_lacks_an_option_is_refused(
    backend: Any, changes: dict[str, Any], precision: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "backend_available", lambda backend: True)
    model = meta()
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(UserError, match=rf"compute\.attention: {backend} has no {option}.*: choose another backend"):
        configure_compute(model, ComputeConfig(attention=backend), precision)
