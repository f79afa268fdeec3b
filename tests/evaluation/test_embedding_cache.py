"""Embeddings on disk: read again, removed when there is no room, and not kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from biphasic.errors import UserError
from biphasic.evaluation.embedding_cache import EmbeddingCache

FULL = 10 * 8 * 4
"""Bytes of a block without its header."""
ROOM = FULL + 180
"""Bytes on disk of a corpus of one block: with its header (128) and the key."""


def block(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((10, 8), np.float32)


def fill(folder: Path, name: str, limit: int, when: float, count: int = 1) -> int:
    """Keep blocks of a corpus, as if used last at that time; return how many were refused."""
    blocks = EmbeddingCache(folder, limit).open({"corpus": name}, count * FULL)
    for number in range(count):
        blocks.write(number, block(number))
    corpus_folder = blocks._folder
    os.utime(corpus_folder, (when, when))
    return blocks.skipped_blocks


def kept_corpora(folder: Path, *names: str) -> list[str]:
    """Return the corpora that have their first block, without opening them: that would count as use."""
    keys = [file for file in (folder / "embeddings").glob("*/key.json") if (file.parent / "000000.npy").is_file()]
    kept = {json.loads(file.read_text())["corpus"] for file in keys}
    return [name for name in names if name in kept]


def test_written_blocks_are_read_again(tmp_path: Path) -> None:
    key = {"model": "m", "prompt": "é", "block": 10}
    blocks = EmbeddingCache(tmp_path, 1 << 20).open(key, 3 * FULL)
    assert blocks.read(0) is None
    blocks.write(0, block(0))
    blocks.write(2, block(2)[:3])
    # The order of the key does not matter.
    blocks = EmbeddingCache(tmp_path, 1 << 20).open(dict(reversed(key.items())), 3 * FULL)
    first, last = blocks.read(0), blocks.read(2)
    assert first is not None and last is not None
    assert np.array_equal(first, block(0)) and np.array_equal(last, block(2)[:3])
    assert first.dtype == np.float32
    assert blocks.read(1) is None and blocks.skipped_blocks == 0
    blocks.write(0, block(7))
    rewritten = blocks.read(0)
    assert rewritten is not None and np.array_equal(rewritten, block(7))


def test_two_keys_have_separate_blocks(tmp_path: Path) -> None:
    cache = EmbeddingCache(tmp_path, 1 << 20)
    one, other = cache.open({"revision": "a"}, FULL), cache.open({"revision": "b"}, FULL)
    one.write(0, block(1))
    assert other.read(0) is None
    other.write(0, block(2))
    read = one.read(0)
    assert read is not None and np.array_equal(read, block(1))


@pytest.mark.parametrize("length", [0, 5, 127, 200, 128 + FULL - 1])
def test_a_damaged_block_counts_as_missing(tmp_path: Path, length: int) -> None:
    blocks = EmbeddingCache(tmp_path, 1 << 20).open({}, FULL)
    blocks.write(0, block(0))
    file = blocks._file(0)
    assert file.stat().st_size == 128 + FULL
    os.truncate(file, length)
    assert blocks.read(0) is None
    file.write_bytes(b"something else entirely")
    assert blocks.read(0) is None
    blocks.write(0, block(0))
    assert np.array_equal(np.asarray(blocks.read(0)), block(0))


def test_a_killed_writer_leaves_no_incomplete_block(tmp_path: Path) -> None:
    code = (
        "import sys, time, numpy as np\nfrom pathlib import Path\n"
        "from biphasic.evaluation.embedding_cache import EmbeddingCache\n"
        "def save(file, embeddings):\n"
        "    original(file, embeddings)\n"
        "    file.truncate(file.tell() - 100); file.flush()\n"
        "    print('half', flush=True); time.sleep(100)\n"
        "original, one = np.save, np.ones((10, 8), np.float32)\n"
        "blocks = EmbeddingCache(Path(sys.argv[1]), 1 << 20).open({}, 640)\n"
        "blocks.write(0, one)\nnp.save = save\nblocks.write(1, one)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    blocks = EmbeddingCache(tmp_path, 1 << 20).open({}, 2 * FULL)
    assert np.array_equal(np.asarray(blocks.read(0)), np.ones((10, 8)))
    assert blocks.read(1) is None and not blocks._file(1).exists()
    blocks.write(1, block(1))
    assert np.array_equal(np.asarray(blocks.read(1)), block(1))


def test_least_recently_used_is_removed_first(tmp_path: Path) -> None:
    limit = 3 * ROOM
    for when, name in ((300, "new"), (100, "old"), (200, "middle")):
        assert fill(tmp_path, name, limit, when) == 0
    assert fill(tmp_path, "next", limit, 400) == 0
    assert kept_corpora(tmp_path, "old", "middle", "new", "next") == ["middle", "new", "next"]
    # A corpus that is used again is the newest.
    EmbeddingCache(tmp_path, limit).open({"corpus": "middle"}, FULL)
    assert fill(tmp_path, "two blocks", limit, 500, count=2) == 0
    assert kept_corpora(tmp_path, "middle", "new", "next", "two blocks") == ["middle", "two blocks"]
    used = sum(file.stat().st_size for file in (tmp_path / "embeddings").rglob("*.npy"))
    assert used <= limit


def test_nothing_is_removed_while_there_is_room(tmp_path: Path) -> None:
    for when, name in enumerate("abcd"):
        assert fill(tmp_path, name, 4 * ROOM, 100 + when) == 0
    assert kept_corpora(tmp_path, *"abcd") == list("abcd")
    assert fill(tmp_path, "a", 4 * ROOM, 200) == 0  # its own blocks aren't counted twice
    assert kept_corpora(tmp_path, *"abcd") == list("abcd")


def test_blocks_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    blocks = EmbeddingCache(tmp_path, 3 * FULL).open({}, 5 * FULL)
    for number in range(5):
        blocks.write(number, block(number))
    assert [blocks.read(number) is not None for number in range(5)] == [True, True, True, False, False]
    assert blocks.skipped_blocks == 2


def test_a_full_disk_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object, embeddings: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    blocks = EmbeddingCache(tmp_path, 1 << 20).open({}, 2 * FULL)
    blocks.write(0, block(0))
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        blocks.write(0, block(5))
        blocks.write(1, block(1))
    assert blocks.skipped_blocks == 2 and blocks.read(1) is None
    assert np.array_equal(np.asarray(blocks.read(0)), block(0))
    assert sorted(file.name for file in blocks._folder.iterdir()) == ["000000.npy", "key.json"]


def test_a_small_disk_is_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "old", 1 << 20, 100)
    usage = type("Usage", (), {"free": 2 * FULL})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    assert fill(tmp_path, "two", 1 << 20, 200, count=2) == 0
    assert kept_corpora(tmp_path, "old", "two") == ["old", "two"]
    assert fill(tmp_path, "more", 1 << 20, 300, count=4) == 0
    assert kept_corpora(tmp_path, "old", "two", "more") == ["more"]


@pytest.mark.parametrize("taken", ["cache", "cache/embeddings"])
def test_an_unwritable_folder_is_refused(tmp_path: Path, taken: str) -> None:
    file = tmp_path / taken
    file.parent.mkdir(exist_ok=True)
    file.write_text("a file")
    with pytest.raises(UserError, match=r"^cache .*/cache/embeddings: can't be written to \(.+\)$"):
        EmbeddingCache(tmp_path / "cache", 1 << 20).open({}, FULL)


def test_concurrent_evaluations_in_too_little_room(tmp_path: Path) -> None:
    """Each may remove what the others have written; a block is then missing, never wrong."""
    errors: list[str] = []

    def work(name: str, seed: int) -> None:
        for _ in range(40):
            try:
                blocks = EmbeddingCache(tmp_path, ROOM).open({"corpus": name}, FULL)
                blocks.write(0, block(seed))
                read = blocks.read(0)
                if read is not None and not np.array_equal(read, block(seed)):
                    errors.append(f"{name} is wrong")
            except (OSError, UserError) as error:
                errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(name, seed)) for seed, name in enumerate("abcd")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
