"""Seeds that depend on the run's seed and on what is drawn."""

import hashlib
from typing import Any


def derive_seed(*purpose: Any) -> int:
    """Return a 63-bit seed, hashed from the name and values of its purpose."""
    text = " ".join(map(str, purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
