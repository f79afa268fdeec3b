"""Embeddings on disk: read again, removed when there is no room, and not kept."""

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
from biphasic.evaluation.blocks import corpus_folder, stored

SHAPE = (10, 8)
FULL = 10 * 8 * 4
"""Bytes of a block without its header."""
ROOM = FULL + 128
"""Bytes on disk of a corpus of one block, with its header."""


def block(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, np.float32)


def used(file: Path, seed: int) -> bool:
    """Return whether a block is read from its file; it is made from the seed if not. Either way, its values are checked."""
    made: list[int] = []

    def make() -> tuple[np.ndarray, int]:
        made.append(seed)
        return block(seed), 10 * seed

    embeddings, cut = stored(file, SHAPE, make)
    assert np.array_equal(embeddings, block(seed)) and cut == 10 * seed
    return not made


def fill(cache: Path, name: str, limit: int, when: float, count: int = 1) -> bool:
    """Store blocks of a corpus, as if used last at that time; return whether there was room."""
    folder = corpus_folder(cache, limit, {"corpus": name}, count * FULL)
    if folder is None:
        return False
    for number in range(count):
        stored(folder / f"{number:06d}.npy", SHAPE, lambda number=number: (block(number), 0))
    os.utime(folder, (when, when))
    return True


def kept_corpora(cache: Path, *names: str) -> list[str]:
    """Return the corpora that have their first block, without opening them: that would count as use."""
    keys = [file for file in (cache / "embeddings").glob("*/key.json") if (file.parent / "000000.npy").is_file()]
    kept = {json.loads(file.read_text())["corpus"] for file in keys}
    return [name for name in names if name in kept]


def test_stored_blocks_are_read_again(tmp_path: Path) -> None:
    key = {"model": "m", "prompt": "é", "block": 10}
    folder = corpus_folder(tmp_path, 1 << 20, key, 3 * FULL)
    assert folder is not None
    first, last = folder / "000000.npy", folder / "000002.npy"
    assert [used(first, 0), used(last, 2), used(first, 0), used(last, 2)] == [False, False, True, True]
    # The order of the key does not matter.
    assert corpus_folder(tmp_path, 1 << 20, dict(reversed(key.items())), 3 * FULL) == folder
    assert stored(first, SHAPE, lambda: (block(7), 0))[0].dtype == np.float32
    other = corpus_folder(tmp_path, 1 << 20, {**key, "model": "n"}, 3 * FULL)
    assert other is not None and not used(other / "000000.npy", 5)
    assert used(first, 0)
    assert np.array_equal(stored(None, SHAPE, lambda: (block(3), 0))[0], block(3))


@pytest.mark.parametrize("length", [0, 5, 127, 200, 128 + FULL - 1])
def test_a_damaged_block_counts_as_missing(tmp_path: Path, length: int) -> None:
    file = tmp_path / "000000.npy"
    assert not used(file, 0)
    assert file.stat().st_size == 128 + FULL
    os.truncate(file, length)
    assert [used(file, 1), used(file, 1)] == [False, True]
    file.write_bytes(b"something else entirely")
    assert [used(file, 0), used(file, 0)] == [False, True]
    np.save(file, block(2)[:3])
    assert [used(file, 0), used(file, 0)] == [False, True]
    # So does one without the number of texts that were cut, or with a damaged one.
    count = file.with_suffix(".cut")
    count.write_text("")
    assert [used(file, 0), used(file, 0)] == [False, True]
    count.unlink()
    assert [used(file, 0), used(file, 0)] == [False, True]


def test_a_killed_writer_leaves_no_incomplete_block(tmp_path: Path) -> None:
    code = (
        "import sys, time, numpy as np\nfrom pathlib import Path\n"
        "from biphasic.evaluation.blocks import stored\n"
        "def save(file, embeddings):\n"
        "    original(file, embeddings)\n"
        "    file.truncate(file.tell() - 100); file.flush()\n"
        "    print('half', flush=True); time.sleep(100)\n"
        "original, folder = np.save, Path(sys.argv[1])\n"
        "def make():\n"
        "    return np.random.default_rng(0).standard_normal((10, 8), np.float32), 0\n"
        "stored(folder / '0.npy', (10, 8), make)\nnp.save = save\nstored(folder / '1.npy', (10, 8), make)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert used(tmp_path / "0.npy", 0)
    assert not (tmp_path / "1.npy").exists()
    assert [used(tmp_path / "1.npy", 1), used(tmp_path / "1.npy", 1)] == [False, True]


def test_least_recently_used_is_removed_first(tmp_path: Path) -> None:
    limit = 3 * ROOM
    for when, name in ((300, "new"), (100, "old"), (200, "middle")):
        assert fill(tmp_path, name, limit, when)
    assert fill(tmp_path, "next", limit, 400)
    assert kept_corpora(tmp_path, "old", "middle", "new", "next") == ["middle", "new", "next"]
    # A corpus that is used again is the newest.
    corpus_folder(tmp_path, limit, {"corpus": "middle"}, FULL)
    assert fill(tmp_path, "two blocks", limit, 500, count=2)
    assert kept_corpora(tmp_path, "middle", "new", "next", "two blocks") == ["middle", "two blocks"]
    assert sum(file.stat().st_size for file in (tmp_path / "embeddings").rglob("*.npy")) <= limit


def test_nothing_is_removed_while_there_is_room(tmp_path: Path) -> None:
    for when, name in enumerate("abcd"):
        assert fill(tmp_path, name, 4 * ROOM, 100 + when)
    assert kept_corpora(tmp_path, *"abcd") == list("abcd")
    assert fill(tmp_path, "a", 4 * ROOM, 200)  # its own blocks aren't counted twice
    assert kept_corpora(tmp_path, *"abcd") == list("abcd")


def test_a_corpus_above_the_limit_is_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert fill(tmp_path, "old", 3 * ROOM, 100)
    assert caplog.text == ""
    assert not fill(tmp_path, "large", 3 * ROOM, 200, count=5)
    assert f"no room for {5 * FULL} bytes" in caplog.text
    assert kept_corpora(tmp_path, "old", "large") == ["old"]


def test_a_full_disk_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object, embeddings: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    assert not used(tmp_path / "0.npy", 0)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        assert [used(tmp_path / "1.npy", 1), used(tmp_path / "1.npy", 1)] == [False, False]
    assert used(tmp_path / "0.npy", 0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0.cut", "0.npy"]


def test_a_small_disk_is_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "old", 1 << 20, 100)
    usage = type("Usage", (), {"free": 2 * FULL})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    assert fill(tmp_path, "two", 1 << 20, 200, count=2)
    assert kept_corpora(tmp_path, "old", "two") == ["old", "two"]
    assert fill(tmp_path, "more", 1 << 20, 300, count=4)
    assert kept_corpora(tmp_path, "old", "two", "more") == ["more"]
    assert not fill(tmp_path, "most", 1 << 20, 400, count=12)


@pytest.mark.parametrize("taken", ["cache", "cache/embeddings"])
def test_an_unwritable_folder_is_refused(tmp_path: Path, taken: str) -> None:
    file = tmp_path / taken
    file.parent.mkdir(exist_ok=True)
    file.write_text("a file")
    with pytest.raises(UserError, match=r"^cache .*/cache/embeddings: can't be written to \(.+\)$"):
        corpus_folder(tmp_path / "cache", 1 << 20, {}, FULL)


def test_concurrent_evaluations_in_too_little_room(tmp_path: Path) -> None:
    """Each may remove what the others have written; a block is then missing, never wrong."""
    errors: list[str] = []

    def work(name: str, seed: int) -> None:
        for _ in range(40):
            try:
                folder = corpus_folder(tmp_path, ROOM, {"corpus": name}, FULL)
                assert folder is not None
                used(folder / "000000.npy", seed)
            except (OSError, UserError, AssertionError) as error:
                errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(name, seed)) for seed, name in enumerate("abcd")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
