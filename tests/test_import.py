"""`import biphasic` makes `eurobert` known to transformers, whatever is imported from there first."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEFORE, AFTER = "import biphasic; from transformers import {}", "from transformers import {}; import biphasic"


@pytest.mark.parametrize(
    ("order", "name"),
    [
        (BEFORE, "AutoModel"),
        (BEFORE, "AutoConfig"),
        (BEFORE, "BertModel"),
        (BEFORE, "LlamaForCausalLM"),
        (AFTER, "BertModel"),
    ],
)
def test_whatever_comes_first(order: str, name: str) -> None:
    code = f"""{order.format(name)}
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification
config = AutoConfig.for_model("eurobert", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                              num_attention_heads=2, pad_token_id=0)
for auto in (AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification):
    print(type(auto.from_config(config)).__name__)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.split() == ["EuroBertModel", "EuroBertForMaskedLM", "EuroBertForSequenceClassification"], (
        found.stderr
    )
