"""sentence-transformers' side of `encoding.py`, in whatever environment runs it: waits for a line, encodes all texts, and
answers with the seconds; at last it writes the embeddings.

    python encoding_sentence_transformers.py MODEL TEXTS.json OUT.npy THREADS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(model: str, texts: str, out: str, threads: str) -> None:
    """Answer until the input ends."""
    import numpy as np
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(int(threads))
    encoder = SentenceTransformer(model, device="cpu")
    given = json.loads(Path(texts).read_text())
    found = encoder.encode(given[:64])
    kind = type(encoder[0].auto_model)
    print(f"transformers {transformers.__version__}, {kind.__module__}.{kind.__name__}", flush=True)
    for _ in sys.stdin:
        start = time.monotonic()
        found = encoder.encode(given)  # sorted by length, in batches of 32: its defaults
        print(time.monotonic() - start, flush=True)
    np.save(out, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
