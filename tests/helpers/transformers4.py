"""transformers 4.57.6 in processes of its own, beside the environment's, and what it makes of exported folders."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

VERSION = "4.57.6"
_PACKAGES = [f"transformers=={VERSION}", "tokenizers==0.22.1", "huggingface_hub==0.36.0"]
"""The last transformers 4, with what it needs in other versions than the environment's."""


def packages() -> Path:
    """Return the folder with transformers 4, inside the environment: installed by the first test that needs it."""
    folder = Path(sys.prefix) / f"transformers-{VERSION}"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            uv = [str(Path(sys.executable).parent / "uv"), "pip", "install", "--quiet", "--python", sys.executable]
            command = [*uv, "--target", str(partial), "--no-deps", *_PACKAGES]
            # Not in the repository, whose pyproject.toml replaces the version of transformers.
            done = subprocess.run(command, cwd=folder.anchor, capture_output=True, text=True)
            assert done.returncode == 0, f"can't install transformers {VERSION} for the tests: {done.stderr}"
            partial.rename(folder)
    return folder


def load_all(folders: dict[str, Path], texts: list[list[int]], sentence: str, work: Path) -> dict[str, Any]:
    """Load exported folders in one process of transformers 4.

    Returns for each name an error's text, or the `encoding` of the sentence and `outputs`: a list of hidden states and,
    where the folder has a head for masked tokens, one of logits. Each is [tokens, ...] of all texts, padded or alone.
    """
    request = {"folders": {name: str(folder) for name, folder in folders.items()}, "texts": texts, "sentence": sentence}
    (work / "request.json").write_text(json.dumps(request))
    path = os.pathsep.join([str(packages()), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # Not the cache of the environment's transformers, which keeps the exports' code too.
    environment |= {"HF_HOME": str(work / "home"), "HF_MODULES_CACHE": str(work / "modules")}
    command = [sys.executable, "-m", "helpers.transformers4", str(work)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(work / "loaded.pt")


@torch.no_grad()
def _outputs(folder: str, texts: list[list[int]]) -> list[list[torch.Tensor]]:
    from transformers import AutoModel, AutoModelForMaskedLM

    config = json.loads((Path(folder) / "config.json").read_text())
    both = ["eager"] if config.get("attn_logit_softcapping") else ["eager", "sdpa"]
    outputs = [_outputs_of(AutoModel, folder, config, texts, both)]
    if config["architectures"][0].endswith("ForMaskedLM"):
        outputs.append(_outputs_of(AutoModelForMaskedLM, folder, config, texts, ["eager"]))
    return outputs


def _outputs_of(
    auto: Any, folder: str, config: dict[str, Any], texts: list[list[int]], implementations: list[str]
) -> list[torch.Tensor]:
    outputs, longest = [], max(map(len, texts))
    for implementation in implementations:
        model = auto.from_pretrained(folder, trust_remote_code=True, attn_implementation=implementation).eval()
        for left in [False, True] if "rope_parameters" in config else [False]:  # BERT's positions are absolute
            padding = [[0] * (longest - len(text)) for text in texts]
            pairs = list(zip(texts, padding, strict=True))
            tokens = torch.tensor([pad + text if left else text + pad for text, pad in pairs])
            mask = torch.tensor([pad + [1] * len(text) if left else [1] * len(text) + pad for text, pad in pairs])
            outputs.append(model(input_ids=tokens, attention_mask=mask)[0][mask.bool()])
        outputs.append(torch.cat([model(input_ids=torch.tensor([text]))[0][0] for text in texts]))
    return outputs


def _main(work: Path) -> None:
    import transformers
    from transformers import AutoTokenizer

    assert transformers.__version__ == VERSION
    request, loaded = json.loads((work / "request.json").read_text()), {}
    for name, folder in request["folders"].items():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            encoding = dict(tokenizer(request["sentence"]))
            loaded[name] = {"encoding": encoding, "outputs": _outputs(folder, request["texts"])}
        except Exception as error:
            loaded[name] = f"{type(error).__name__}: {error}"
    torch.save(loaded, work / "loaded.pt")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
