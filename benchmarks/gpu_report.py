"""What benchmarks/gpu.py has measured so far, as JSON and Markdown, written after each measurement."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GOALS = {("1b", "clm"): 0.55, ("210m", "clm"): 0.50, ("1b", "mlm"): 0.60, ("210m", "mlm"): 0.60, ("610m", "mlm"): 0.60}
"""MFU to reach on an H100 or H200."""


@dataclass
class Attempt:
    """Whether a measurement went through."""

    worked: bool = False


class Report:
    """Collects, writes, and prints lines as they come.

    Args:
        folder: of the results.
        device: its name becomes the files'.
        until: `time.monotonic()` after which no measurement begins.
    """

    def __init__(self, folder: Path, device: str, until: float):
        self.path = folder / f"gpu-{'-'.join(device.lower().split())}"
        self.until = until
        self.found: dict[str, Any] = {"measured": [], "profiles": {}, "failed": []}

    def time_left(self) -> bool:
        """Whether another measurement may begin."""
        return time.monotonic() < self.until

    def note(self, key: str, value: Any) -> None:
        """Keep a figure of the whole run."""
        self.found[key] = value
        print(f"{key}: {json.dumps(value)}", flush=True)
        self.write()

    def add(self, size: str, phase: str, ways: Any, numbers: dict[str, Any]) -> None:
        """Keep a measurement."""
        self.found["measured"].append({"size": size, "phase": phase, "ways": asdict(ways), **numbers})
        of_peak = "" if numbers["mfu"] is None else f", MFU {numbers['mfu']:.1%}"
        print(f"{size} {phase} {ways}: {numbers['tokens_per_second']:,.0f} tokens/s{of_peak}", flush=True)
        self.write()

    def profiled(self, size: str, phase: str, numbers: dict[str, Any]) -> None:
        """Keep where the time of a step goes."""
        self.found["profiles"][f"{size} {phase}"] = numbers
        self.write()

    @contextmanager
    def attempt(self, what: str) -> Iterator[Attempt]:
        """A measurement whose failure is written down and doesn't end the others."""
        attempt = Attempt()
        try:
            yield attempt
            attempt.worked = True
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {str(error).strip()[:600]}"
            self.found["failed"].append({"what": what, "error": said, "at": f"{where.filename}:{where.lineno}"})
            print(f"{what}: failed, {said}", flush=True)
            self.write()

    def best(self, size: str, phase: str) -> dict[str, Any] | None:
        """The first measurement of a size and phase: in the way that training would choose."""
        return next((m for m in self.found["measured"] if (m["size"], m["phase"]) == (size, phase)), None)

    def write(self) -> None:
        """Both files, each whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        chosen: dict[str, dict[str, float]] = {}
        for one in reversed(self.found["measured"]):
            if one["mfu"] is not None:
                chosen.setdefault(one["size"], {})[one["phase"]] = round(one["mfu"], 4)
        for suffix, text in (
            (".json", json.dumps({"mfu": chosen, **self.found}, indent=1) + "\n"),
            (".md", self.markdown()),
        ):
            temporary = self.path.with_name(f"{self.path.name}{suffix}.tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path.with_name(self.path.name + suffix))

    def markdown(self) -> str:
        """The tables."""
        machine = self.found.get("machine", {})
        lines = [
            f"# Training on one {machine.get('device', 'GPU')}",
            "",
            "`make bench-gpu`, " + ", ".join(f"{key} {value}" for key, value in machine.items()),
            "",
        ]
        roof, peak = self.found.get("roofline"), self.found.get("dense_peak")
        if roof is not None:
            product, copy = roof["matrix_product_flops_per_second"], roof["copy_bytes_per_second"]
            sheet = "" if peak is None else f", {product / peak:.0%} of the data sheet's {peak / 1e12:,.0f}"
            lines += [f"Roofline: a bf16 product of 8,192 x 8,192 matrices at {product / 1e12:,.0f} TFLOP/s{sheet}; a copy "
                      f"at {copy / 1e12:.2f} TB/s.", ""]  # fmt: skip
        lines += [
            "| size | phase | layers | attention | rows | microbatch | tokens/s | over the first | MFU | goal | of the "
            "product's rate | peak GiB |",
            "|-|-|-|-|-|-:|-:|-:|-:|-:|-:|-:|",
        ]
        for one in self.found["measured"]:
            ways, first = one["ways"], self.best(one["size"], one["phase"])
            assert first is not None
            goal = GOALS.get((one["size"], one["phase"])) if one is first else None
            cells = [
                one["size"], one["phase"], "compiled" if ways["compile"] else "eager", ways["attention"], ways["packing"],
                str(one["microbatch_rows"]), f"{one['tokens_per_second']:,.0f}",
                f"{one['tokens_per_second'] / first['tokens_per_second']:.2f}",
                "" if one["mfu"] is None else f"{one['mfu']:.1%}", "" if goal is None else f"{goal:.0%}",
                "" if roof is None else f"{one['flops_per_second'] / roof['matrix_product_flops_per_second']:.0%}",
                "" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 2**30:.1f}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        for name, profile in self.found["profiles"].items():
            shares = sorted(profile["share_of_wall"].items(), key=lambda item: -item[1])
            lines += ["", f"A step of {name}: " + ", ".join(f"{kind} {share:.0%}" for kind, share in shares) + "."]
        lines += [f"\nFailed: {one['what']}: {one['error'].splitlines()[0]}" for one in self.found["failed"]]
        return "\n".join(lines) + "\n"
