"""sentence-transformers' settings of a model on the hub, through the hub's own client."""

import json
import subprocess
import sys
from pathlib import Path

from helpers.hub_server import Repository, serve_hub

READ = """
import sys, time
from biphasic.errors import UserError
from biphasic.model.pooling import read_sentence_settings

time.sleep = lambda seconds: None
for name in sys.argv[1:]:
    try:
        print(dict(read_sentence_settings(name, None).prompts))
    except UserError as error:
        print(error)
"""


def read(names: list[str], environment: dict[str, str]) -> list[str]:
    done = subprocess.run([sys.executable, "-c", READ, *names], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_hub_that_does_not_answer_is_not_taken_for_a_missing_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "Query: "}}))
    (tmp_path / "plain").mkdir()
    repositories = {
        f"org/{name}": Repository({"1" * 40: tmp_path / name}, {"main": "1" * 40}) for name in ("model", "plain")
    }
    with serve_hub(repositories, tmp_path / "home") as environment:
        environment.pop("HF_HUB_OFFLINE", None)
        assert read(["org/model", "org/plain"], environment) == ["{'query': 'Query: '}", "{}"]
    # The hub is away. The cache has the first model's files, and records that the second has none.
    known, plain, unknown = read(["org/model", "org/plain", "org/other"], environment)
    assert (known, plain) == ("{'query': 'Query: '}", "{}")
    assert unknown.startswith("model org/other: ") and "can't be read from the hub (" in unknown
