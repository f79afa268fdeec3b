"""The chunked loss equals that with all logits, in bounded memory."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from biphasic.model import losses
from biphasic.model.language_model import from_hf_config
from biphasic.model.losses import IGNORE, cross_entropy_at_targets
from biphasic.model.segments import Segments
from biphasic.objectives.targets import clm_targets


def problem(tokens: int = 50, width: int = 16, words: int = 300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(words, width, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(words, (tokens,))
    targets[::3] = IGNORE
    return hidden, weight, targets


@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_same_value_and_gradients_as_full_logits(chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_tokens * 300 * 4)
    hidden, weight, targets = problem()
    (cross_entropy_at_targets(hidden, weight, targets) * 0.37).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    expected = F.cross_entropy((hidden @ weight.T).float(), targets, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(cross_entropy_at_targets(hidden, weight, targets), expected.float())
    (expected * 0.37).backward()
    # The logits are fp32, as in training, for weights of any dtype.
    torch.testing.assert_close(gradients[0], hidden.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients[1], weight.grad, atol=1e-6, rtol=1e-5)


def test_validation_computes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter requires gradients under `no_grad` too."""
    hidden, targets = torch.randn(12, 8), torch.arange(12)
    weight = torch.nn.Parameter(torch.randn(20, 8))
    expected = cross_entropy_at_targets(hidden, weight, targets)

    def refuse(*_: object) -> None:
        raise AssertionError("gradients are computed")

    monkeypatch.setattr(losses, "_loss_and_gradient", refuse)
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy_at_targets(hidden, weight, targets), expected.detach())
    with pytest.raises(AssertionError, match="gradients are computed"):
        cross_entropy_at_targets(hidden, weight, targets)


def test_softcap_has_the_gradient_of_autograd() -> None:
    hidden, weight, targets = problem()
    cross_entropy_at_targets(hidden, weight, targets, softcap=5.0).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = 5.0 * torch.tanh(hidden @ weight.T / 5.0)
    torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum").backward()
    torch.testing.assert_close(gradients[0], hidden.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients[1], weight.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_a_bias_and_layers_before_the_head(chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers before the head run only where there is a target; all gradients are those of full logits."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_tokens * 300 * 4)
    hidden, weight, targets = problem()
    bias = torch.randn(300, dtype=torch.float64, requires_grad=True)
    transform, shapes = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()).double(), []
    transform.register_forward_hook(lambda *given: shapes.append(given[-1].shape[0]))
    leaves = [hidden, weight, bias, *transform.parameters()]
    loss = cross_entropy_at_targets(hidden, weight, targets, bias=bias, transform=transform)
    gradients = torch.autograd.grad(0.37 * loss, leaves)
    assert shapes == [int((targets != IGNORE).sum())]
    logits = transform(hidden) @ weight.T + bias
    expected = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(0.37 * expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    loss = cross_entropy_at_targets(hidden, weight, torch.full_like(targets, IGNORE), bias=bias, transform=transform)
    assert loss == 0 and all(not gradient.any() for gradient in torch.autograd.grad(loss, leaves))


def test_without_targets_loss_and_gradients_are_zero() -> None:
    hidden, weight, targets = problem()
    loss = cross_entropy_at_targets(hidden, weight, torch.full_like(targets, IGNORE))
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() == 0


def tiny() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
    )


def test_clm_loss_equals_hugging_face_s() -> None:
    model = from_hf_config(tiny(), seed=1)
    original = LlamaForCausalLM(tiny())
    original.model.load_state_dict(model.backbone.state_dict())
    original.lm_head.load_state_dict(model.lm_head.state_dict())
    tokens = torch.randint(128, (3, 20), generator=torch.Generator().manual_seed(2))
    targets = clm_targets(tokens, torch.ones_like(tokens))
    total, count = model(tokens.flatten(), targets.flatten(), Segments.of([20] * 3, tokens.device), causal=True)
    expected = original(input_ids=tokens, labels=tokens).loss
    assert count == 3 * 19
    assert abs(float(total / count) - float(expected)) < 1e-5


def test_packed_loss_is_the_token_weighted_mean_of_documents() -> None:
    model = from_hf_config(tiny(), seed=1)
    lengths = [4, 9, 2, 5]
    tokens = torch.randint(128, (1, 20), generator=torch.Generator().manual_seed(2))
    segment_ids = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(lengths))[None]
    targets = clm_targets(tokens, segment_ids)[0]
    total, count = model(tokens[0], targets, Segments.of(lengths, tokens.device), causal=True)
    means, weights = [], []
    for piece in tokens[0].split(lengths):
        alone = clm_targets(piece[None], torch.ones_like(piece)[None])[0]
        loss, predicted = model(piece, alone, Segments.of([len(piece)], tokens.device), causal=True)
        means.append(float(loss / predicted))
        weights.append(int(predicted))
    average = sum(m * w for m, w in zip(means, weights, strict=True)) / sum(weights)
    assert abs(float(total / count) - average) < 1e-5


PEAK = """
import resource, sys, torch
sys.path[:0] = {path!r}
from biphasic.model.losses import IGNORE, cross_entropy_at_targets
tokens, width, words = {tokens}, {width}, 128256
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(words, width) * 0.02)
weight.grad = torch.zeros_like(weight)
hidden = torch.randn(tokens, width, requires_grad=True)
targets = torch.randint(words, (tokens,))
if {objective!r} == "mlm":
    targets[torch.rand(tokens) > 0.4] = IGNORE
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
before = peak()
cross_entropy_at_targets(hidden, weight, targets).backward()
assert hidden.grad.abs().sum() > 0
print(peak() - before)
"""


@pytest.mark.parametrize(
    ("objective", "tokens", "width", "limit"),
    [
        ("clm", 2048, 32, 0.6e9),
        pytest.param("clm", 8192, 768, 1.5e9, marks=pytest.mark.slow),
        pytest.param("mlm", 8192, 768, 1.5e9, marks=pytest.mark.slow),
    ],
)
def test_peak_memory_at_a_large_vocabulary(objective: str, tokens: int, width: int, limit: float) -> None:
    """128,256 words in fp32, forward and backward: the peak above the weights and their gradients."""
    code = PEAK.format(path=sys.path, objective=objective, tokens=tokens, width=width)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak = int(run.stdout)
    full_logits = tokens * 128256 * 4
    assert peak < limit < full_logits, f"{peak / 1e9:.2f} GB"
