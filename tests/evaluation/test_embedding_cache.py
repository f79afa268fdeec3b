"""Embeddings on disk: what comes back, what has to go, and what isn't kept."""

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

from biphasic.config.errors import UserError
from biphasic.evaluation.embedding_cache import EmbeddingCache

FULL = 10 * 8 * 4
"""Bytes of a block's numbers."""
ROOM = FULL + 180
"""What a corpus of one block takes on disk: a header (128) and the key besides."""


def block(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((10, 8), np.float32)


def fill(folder: Path, name: str, limit: int, when: float, count: int = 1) -> int:
    """Keep blocks of a corpus, as if at that time; how many were refused."""
    with EmbeddingCache(folder, limit).blocks({"corpus": name}, count * FULL) as blocks:
        for number in range(count):
            blocks.put(number, block(number))
        place = blocks._folder
    os.utime(place, (when, when))
    return blocks.refused


def kept(folder: Path, *names: str) -> list[str]:
    """Which of the corpora have their first block, from outside, so that looking is no use."""
    keys = [file for file in (folder / "embeddings").glob("*/key.json") if (file.parent / "000000.npy").is_file()]
    found = {json.loads(file.read_text())["corpus"] for file in keys}
    return [name for name in names if name in found]


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    key = {"model": "m", "prompt": "é", "block": 10}
    with EmbeddingCache(tmp_path, 1 << 20).blocks(key, 3 * FULL) as blocks:
        assert blocks.get(0) is None
        blocks.put(0, block(0))
        blocks.put(2, block(2)[:3])
    # Another process, whose key is written in another order.
    with EmbeddingCache(tmp_path, 1 << 20).blocks(dict(reversed(key.items())), 3 * FULL) as blocks:
        first, last = blocks.get(0), blocks.get(2)
        assert first is not None and last is not None
        assert np.array_equal(first, block(0)) and np.array_equal(last, block(2)[:3])
        assert first.dtype == np.float32
        assert blocks.get(1) is None and blocks.refused == 0
        blocks.put(0, block(7))
        again = blocks.get(0)
        assert again is not None and np.array_equal(again, block(7))


def test_two_keys_do_not_mix(tmp_path: Path) -> None:
    cache = EmbeddingCache(tmp_path, 1 << 20)
    with cache.blocks({"revision": "a"}, FULL) as one, cache.blocks({"revision": "b"}, FULL) as other:
        one.put(0, block(1))
        assert other.get(0) is None
        other.put(0, block(2))
        found = one.get(0)
        assert found is not None and np.array_equal(found, block(1))


@pytest.mark.parametrize("length", [0, 5, 127, 200, 128 + FULL - 1])
def test_a_damaged_block_is_made_again(tmp_path: Path, length: int) -> None:
    with EmbeddingCache(tmp_path, 1 << 20).blocks({}, FULL) as blocks:
        blocks.put(0, block(0))
        file = blocks._file(0)
        assert file.stat().st_size == 128 + FULL
        os.truncate(file, length)
        assert blocks.get(0) is None
        file.write_bytes(b"something else entirely")
        assert blocks.get(0) is None
        blocks.put(0, block(0))
        assert np.array_equal(np.asarray(blocks.get(0)), block(0))


def test_a_killed_writer_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    code = (
        "import sys, time, numpy as np\nfrom pathlib import Path\n"
        "from biphasic.evaluation.embedding_cache import EmbeddingCache\n"
        "def save(file, embeddings):\n"
        "    whole(file, embeddings)\n"
        "    file.truncate(file.tell() - 100); file.flush()\n"
        "    print('half', flush=True); time.sleep(100)\n"
        "whole, one = np.save, np.ones((10, 8), np.float32)\n"
        "with EmbeddingCache(Path(sys.argv[1]), 1 << 20).blocks({}, 640) as blocks:\n"
        "    blocks.put(0, one)\n    np.save = save\n    blocks.put(1, one)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    with EmbeddingCache(tmp_path, 1 << 20).blocks({}, 2 * FULL) as blocks:
        assert np.array_equal(np.asarray(blocks.get(0)), np.ones((10, 8)))
        assert blocks.get(1) is None and not blocks._file(1).exists()
        blocks.put(1, block(1))
        assert np.array_equal(np.asarray(blocks.get(1)), block(1))


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    limit = 3 * ROOM
    for when, name in ((300, "new"), (100, "old"), (200, "middle")):
        assert fill(tmp_path, name, limit, when) == 0
    assert fill(tmp_path, "next", limit, 400) == 0
    assert kept(tmp_path, "old", "middle", "new", "next") == ["middle", "new", "next"]
    # Used again, it is the newest.
    with EmbeddingCache(tmp_path, limit).blocks({"corpus": "middle"}, FULL) as blocks:
        os.utime(blocks._folder, (1, 1))  # its use began long ago, and ends now
    assert fill(tmp_path, "two blocks", limit, 500, count=2) == 0
    assert kept(tmp_path, "middle", "new", "next", "two blocks") == ["middle", "two blocks"]
    used = sum(file.stat().st_size for file in (tmp_path / "embeddings").rglob("*.npy"))
    assert used <= limit


def test_nothing_goes_while_there_is_room(tmp_path: Path) -> None:
    for when, name in enumerate("abcd"):
        assert fill(tmp_path, name, 4 * ROOM, 100 + when) == 0
    assert kept(tmp_path, *"abcd") == list("abcd")
    assert fill(tmp_path, "a", 4 * ROOM, 200) == 0  # what it has already isn't counted twice
    assert kept(tmp_path, *"abcd") == list("abcd")


def test_what_somebody_uses_stays(tmp_path: Path) -> None:
    """In this process or another; what comes then finds no room. When the user is gone, killed or not, it goes."""
    fill(tmp_path, "used", ROOM, 100)
    with EmbeddingCache(tmp_path, ROOM).blocks({"corpus": "used"}, FULL) as blocks:
        assert fill(tmp_path, "other", ROOM, 200) == 1
        assert blocks.get(0) is not None
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom biphasic.evaluation.embedding_cache import EmbeddingCache\n"
        "with EmbeddingCache(Path(sys.argv[1]), 1 << 20).blocks({'corpus': 'used'}, 0):\n"
        "    print('there', flush=True); time.sleep(100)\n"
    )
    user = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert user.stdout is not None and user.stdout.readline() == "there\n"
    try:
        assert fill(tmp_path, "other", ROOM, 300) == 1
        assert kept(tmp_path, "used", "other") == ["used"]
    finally:
        user.kill()
        user.wait()
        user.stdout.close()
    assert fill(tmp_path, "other", ROOM, 400) == 0
    assert kept(tmp_path, "used", "other") == ["other"]


def test_blocks_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    with EmbeddingCache(tmp_path, 3 * FULL).blocks({}, 5 * FULL) as blocks:
        for number in range(5):
            blocks.put(number, block(number))
        assert [blocks.get(number) is not None for number in range(5)] == [True, True, True, False, False]
        assert blocks.refused == 2


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object, embeddings: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    with EmbeddingCache(tmp_path, 1 << 20).blocks({}, 2 * FULL) as blocks:
        blocks.put(0, block(0))
        with monkeypatch.context() as patch:
            patch.setattr(np, "save", full)
            blocks.put(0, block(5))
            blocks.put(1, block(1))
        assert blocks.refused == 2 and blocks.get(1) is None
        assert np.array_equal(np.asarray(blocks.get(0)), block(0))  # what was there is there still
        assert sorted(file.name for file in blocks._folder.iterdir()) == ["000000.npy", "key.json"]


def test_little_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as the limit does: old embeddings make room."""
    fill(tmp_path, "old", 1 << 20, 100)
    usage = type("Usage", (), {"free": 2 * FULL})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    assert fill(tmp_path, "two", 1 << 20, 200, count=2) == 0
    assert kept(tmp_path, "old", "two") == ["old", "two"]
    assert fill(tmp_path, "more", 1 << 20, 300, count=4) == 0
    assert kept(tmp_path, "old", "two", "more") == ["more"]


@pytest.mark.parametrize("taken", ["cache", "cache/embeddings"])
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, taken: str) -> None:
    file = tmp_path / taken
    file.parent.mkdir(exist_ok=True)
    file.write_text("a file")
    with (
        pytest.raises(UserError, match=r"^cache .*/cache/embeddings: can't be written to \(.+\)$"),
        EmbeddingCache(tmp_path / "cache", 1 << 20).blocks({}, FULL),
    ):
        pass


def test_many_at_once_in_too_little_room(tmp_path: Path) -> None:
    """Each removes what the others have just made, and none of what they hold."""
    wrong: list[str] = []

    def work(name: str) -> None:
        for number in range(150):
            try:
                with EmbeddingCache(tmp_path, ROOM).blocks({"corpus": name}, FULL) as blocks:
                    blocks.put(0, block(number))
                    if not blocks.refused and not np.array_equal(np.asarray(blocks.get(0)), block(number)):
                        wrong.append(f"{name} {number} is lost")
            except (OSError, UserError) as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
