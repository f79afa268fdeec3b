"""What `make bench-readers` calls equal, refused and WRONG; the readers themselves need a package registry."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
readers = importlib.import_module("readers")


def test_verdicts() -> None:
    verdict = readers.verdict
    right = [[1.0, 2.0], [3.0, 4.0]]
    assert verdict({"outputs": [1.0, 2.0, 3.0, 4.0009], "heard": ""}, right, "a")[0] == "equal"
    assert verdict({"outputs": [1.0, 2.0, 3.0, 4.01], "heard": ""}, right, "a")[0] == "WRONG"
    assert verdict({"outputs": right[:1], "heard": ""}, right, "a")[0] == "WRONG"
    assert verdict({"outputs": [1.0, 2.0, 3.0, float("nan")], "heard": ""}, right, "a")[0] == "WRONG"
    assert "warning" in verdict({"outputs": [0.0] * 4, "heard": "weights are newly initialized"}, right, "a")[0]
    assert verdict({"error": "ValueError: eurobert", "heard": ""}, right, "a") == ("refused", None)
    assert verdict({"outputs": [1.0, 2.0, 3.0, 4.01], "heard": ""}, right, "a-int8")[0] == "int8: 1e-02"


def test_versions_with_one_outcome_share_a_row() -> None:
    results = {f"maker {number}.0, kind": {"evaluate": "equal"} for number in (1, 2)} | {
        "maker 3.0, kind": {"evaluate": "refused"}
    }
    assert readers.their_table(results).splitlines()[2:] == [
        "| maker 1.0, 2.0: kind | equal |",
        "| maker 3.0: kind | refused |",
    ]
