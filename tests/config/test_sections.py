"""How sections of files and overrides merge, and messages about the file itself."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.read import read_tree
from biphasic.errors import ConfigError

ROOT = Path(__file__).parents[2]
FINEWEB = ROOT / "yamls" / "data" / "fineweb_edu_100bt.yaml"
QUICKSTART = ROOT / "yamls" / "quickstart.yaml"
FILES = FilesSource(kind="files", paths=["my_text/"])


def convert(*overrides: str, file: Path = FINEWEB) -> ConvertConfig:
    config = load(file, list(overrides))
    assert isinstance(config, ConvertConfig)
    return config


def problems(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["source={kind: files, paths: [my_text/]}"],
        ["source.kind=files", "source.paths=[my_text/]"],
        ["source.paths=[my_text/]", "source.kind=files"],
    ],
)
def test_an_override_with_another_kind_replaces_the_section(overrides: list[str]) -> None:
    assert convert(*overrides).source == FILES


def test_a_file_with_another_kind_replaces_the_section(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        f"defaults: {FINEWEB}\nsource: {{kind: files, paths: [my_text/]}}\nsegments: {{kind: documents}}\noutput: out\n"
    )
    config = convert(file=path)
    assert config.source == FILES
    assert config.segments.kind == "documents" and config.segments.is_default("shortest")


def test_the_same_kind_merges() -> None:
    source: Any = convert("source={split: test}", "segments={kind: stream}").source
    assert (source.split, source.name, source.path) == ("test", "sample-100BT", "HuggingFaceFW/fineweb-edu")
    assert convert("segments={kind: stream}").segments.shortest == 12


def test_a_phase_with_another_name_is_replaced() -> None:
    config = load(QUICKSTART, ["objective.phases.1={name: clm}"])
    assert isinstance(config, PretrainConfig)
    assert [phase.name for phase in config.objective.phases] == ["clm", "clm"]


def test_a_message_places_a_key_where_it_was_written() -> None:
    message = problems(FINEWEB, "source={spilt: train}", "source.revision=3")
    assert "command line: source.spilt: unknown key; did you mean `source.split`?" in message
    assert "command line: source.revision: " in message
    # The hub's `path` is dropped, and `paths` keeps its place.
    assert "command line: source.paths.0: " in problems(FINEWEB, "source.paths=[3]", "source.kind=files")
    message = problems(QUICKSTART, "data={shufle: true}", "data.sequence_length=16", "model={head_dim: 3}")
    assert f"{QUICKSTART}:" not in message
    line = QUICKSTART.read_text().splitlines().index("  num_heads: 2") + 1
    assert f"{QUICKSTART}:{line}: model.num_heads: " in problems(QUICKSTART, "model={hidden_size: 129}")


def test_sections_without_interpolations_are_what_omegaconf_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets only the others, unless an interpolation may refer to any section."""
    given, create = [], OmegaConf.create
    tree = read_tree(ROOT / "yamls" / "210m_biphasic.yaml", ["run_name=x", "output=a"])
    monkeypatch.delenv("BUCKET", raising=False)
    monkeypatch.setattr(OmegaConf, "create", lambda content: given.append(content) or create(content))
    content = tree.content()
    assert content["checkpoint"]["folder"] == "a/x/checkpoints" and "objective" in content
    assert {"objective", "optimizer", "schedule"}.isdisjoint(given[-1]) and {"data", "checkpoint", "output"} <= given[
        -1
    ].keys()
    assert content == OmegaConf.to_container(create(tree.merged), resolve=True) and list(content) == list(tree.merged)
    content["objective"]["phases"].clear()
    assert tree.merged["objective"]["phases"], "the content is a copy"
    for text, expected in (("${data.folder}", "b"), ("${oc.select:data.folder}", "b"), ("${.folder}", "b")):
        tree.update("data.folder", "b", {})
        tree.update("data.cache", text, {})
        assert tree.content()["data"]["cache"] == expected
        assert given[-1].keys() == tree.merged.keys()


def test_problems_stay_what_they_are_in_another_process() -> None:
    with pytest.raises(ConfigError) as caught:
        load(FINEWEB, ["sequence_lengt=512", "shard_bytes=many"])
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.problems == caught.value.problems and str(copied) == str(caught.value) and len(copied.problems) == 2
