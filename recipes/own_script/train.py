"""A Composer script of one's own with Biphasic's switch: CLM, then MLM, and a schedule. Two minutes on two CPU cores.

    python recipes/own_script/train.py [FOLDER]

It makes a tiny decoder and text on the spot, checks what the decoder attends to, trains it in both directions, and stores
checkpoints in FOLDER (default: runs/own_script), from which the same command resumes; after the end it does nothing.
"""

import sys

import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from biphasic import CLM, MLM, ObjectiveSwitch, WarmupStableDecay, check_attention, pack

LENGTH = 64
WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u", "ai", "ei", "ou")]


def sentence(number: int) -> str:
    """Return a text in which each word follows from the two before it, so that both objectives have something to learn."""
    ids = [number % 89, number * 7 % 83]
    for _ in range(10 + number % 20):
        ids.append((3 * ids[-1] + ids[-2] + 5) % len(WORDS))
    return " ".join(WORDS[index] for index in ids)


special = {"pad_token": "<pad>", "mask_token": "<mask>", "eos_token": "<eos>"}
vocabulary = {word: index for index, word in enumerate([*special.values(), *WORDS])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)

torch.manual_seed(17)
decoder = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=LENGTH, pad_token_id=0, bos_token_id=None, eos_token_id=2,
    )
)  # fmt: skip
print(check_attention(decoder, require="causal"))

documents = [tokenizer(sentence(number))["input_ids"] + [tokenizer.eos_token_id] for number in range(6000)]
loader = DataLoader(pack(documents, LENGTH), batch_size=16, shuffle=False, drop_last=True)  # pyright: ignore[reportArgumentType]
model = HuggingFaceModel(decoder, tokenizer=tokenizer)
trainer = Trainer(
    model=model,
    train_dataloader=loader,
    max_duration="200ba",
    optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
    algorithms=[
        ObjectiveSwitch([CLM(until="0.5dur"), MLM(masking_ratio=0.4)], tokenizer=tokenizer, seed=17),
        WarmupStableDecay(warmup="20ba", decay="40ba", lr=3e-3),
    ],
    device_train_microbatch_size=8,
    run_name="own_script",
    save_folder=sys.argv[1] if len(sys.argv) > 1 else "runs/own_script",
    save_interval="50ba",
    autoresume=True,
    progress_bar=False,
    log_to_console=True,
    console_log_interval="25ba",
)
if trainer.state.timestamp < trainer.state.max_duration:  # pyright: ignore[reportOperatorIssue]
    trainer.fit()
else:  # Composer's `fit` would raise an error, so a scheduler would start the script again
    print("the checkpoints hold the whole training; nothing to do")
trainer.close()
