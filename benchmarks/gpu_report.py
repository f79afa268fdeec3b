"""The measurements of benchmarks/gpu.py as JSON and Markdown, written after each one, and the GPU and its own rates."""

import json
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from biphasic.model.attention import BACKEND_FUNCTIONS, backend_available

GOALS = {("1b", "clm"): 0.55, ("210m", "clm"): 0.50, ("1b", "mlm"): 0.60, ("210m", "mlm"): 0.60, ("610m", "mlm"): 0.60}
"""MFU to reach on an H100 or H200."""


@dataclass
class Attempt:
    """Whether a measurement succeeded."""

    worked: bool = False


class Report:
    """Collects, prints and writes measurements to files that are named after the device. None starts after `until`."""

    def __init__(self, folder: Path, device: str, until: float):
        self.path = folder / f"gpu-{'-'.join(device.lower().split())}"
        self.until = until
        self.results: dict[str, Any] = {"measured": [], "profiles": {}, "failed": []}

    def time_left(self) -> bool:
        return time.monotonic() < self.until

    def note(self, key: str, value: Any) -> None:
        self.results[key] = value
        print(f"{key}: {json.dumps(value)}", flush=True)
        self.write()

    def add(self, size: str, phase: str, variant: Any, numbers: dict[str, Any]) -> None:
        self.results["measured"].append({"size": size, "phase": phase, "ways": asdict(variant), **numbers})
        of_peak = "" if numbers["mfu"] is None else f", MFU {numbers['mfu']:.1%}"
        first = f", first step {numbers['first_step_seconds']:.1f} s"
        print(f"{size} {phase} {variant}: {numbers['tokens_per_second']:,.0f} tokens/s{of_peak}{first}", flush=True)
        self.write()

    def profiled(self, size: str, phase: str, numbers: dict[str, Any]) -> None:
        self.results["profiles"][f"{size} {phase}"] = numbers
        self.write()

    @contextmanager
    def attempt(self, name: str) -> Iterator[Attempt]:
        """Record the failure of a measurement, so that the others still run."""
        attempt = Attempt()
        try:
            yield attempt
            attempt.worked = True
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {str(error).strip()[:600]}"
            self.results["failed"].append({"what": name, "error": message, "at": f"{frame.filename}:{frame.lineno}"})
            print(f"{name}: failed, {message}", flush=True)
            self.write()

    def best(self, size: str, phase: str) -> dict[str, Any] | None:
        """The first measurement of a size and phase, in the variant that training would use."""
        return next((m for m in self.results["measured"] if (m["size"], m["phase"]) == (size, phase)), None)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        chosen: dict[str, dict[str, float]] = {}
        for measurement in reversed(self.results["measured"]):
            if measurement["mfu"] is not None:
                chosen.setdefault(measurement["size"], {})[measurement["phase"]] = round(measurement["mfu"], 4)
        for suffix, text in (
            (".json", json.dumps({"mfu": chosen, **self.results}, indent=1) + "\n"),
            (".md", self.markdown()),
        ):
            temporary = self.path.with_name(f"{self.path.name}{suffix}.tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path.with_name(self.path.name + suffix))

    def markdown(self) -> str:
        machine = self.results.get("machine", {})
        lines = [
            f"# Training on one {machine.get('device', 'GPU')}",
            "",
            "`make bench-gpu`, " + ", ".join(f"{key} {value}" for key, value in machine.items()),
            "",
        ]
        roof, peak = self.results.get("roofline"), self.results.get("dense_peak")
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
        for measurement in self.results["measured"]:
            variant, first = measurement["ways"], self.best(measurement["size"], measurement["phase"])
            assert first is not None
            goal = GOALS.get((measurement["size"], measurement["phase"])) if measurement is first else None
            cells = [
                measurement["size"], measurement["phase"], _layers(variant), measurement["attention"], variant["packing"],
                str(measurement["microbatch_rows"]), f"{measurement['tokens_per_second']:,.0f}",
                f"{measurement['tokens_per_second'] / first['tokens_per_second']:.2f}",
                "" if measurement["mfu"] is None else f"{measurement['mfu']:.1%}", "" if goal is None else f"{goal:.0%}",
                "" if roof is None else f"{measurement['flops_per_second'] / roof['matrix_product_flops_per_second']:.0%}",
                "" if measurement["peak_bytes"] is None else f"{measurement['peak_bytes'] / 2**30:.1f}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        for name, profile in self.results["profiles"].items():
            shares = sorted(profile["share_of_wall"].items(), key=lambda item: -item[1])
            lines += [
                "",
                f"A step of {name}: " + ", ".join(f"{kind} {share:.0%}" for kind, share in shares) + ". Longest:",
            ]
            lines += [f"{one['share_of_wall']:.1%} `{one['name']}`  " for one in profile.get("longest_kernels", [])[:5]]
        lines += [
            f"\nFailed: {measurement['what']}: {measurement['error'].splitlines()[0]}"
            for measurement in self.results["failed"]
        ]
        return "\n".join(lines) + "\n"


def _layers(variant: dict[str, Any]) -> str:
    """What a variant changes about the layers and the loss."""
    words = ["compiled" if variant["compile"] else "eager"]
    words += [variant["mode"]] * (variant["mode"] != "default") + ["bf16 residual"] * (variant["residual"] == "bf16")
    if variant["loss_chunks"] != 1:
        words.append(f"chunks of the loss {variant['loss_chunks']:g}")
    return ", ".join(words)


def synchronize(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def roofline(device: str, side: int = 8192, copied: int = 2 << 30) -> dict[str, float]:
    """FLOP/s of a large bf16 matrix product of random numbers, and bytes/s (read and written) of a large copy."""

    def median(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        durations = []
        for _ in range(10):
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            durations.append(time.perf_counter() - start)
        return statistics.median(durations)

    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(copied // 4, device=device)
    target = torch.empty_like(source)
    return {
        "matrix_product_flops_per_second": 2 * side**3 / median(lambda: a @ b),
        "copy_bytes_per_second": 2 * copied / median(lambda: target.copy_(source)),
    }


def describe_machine() -> dict[str, Any]:
    """Device and versions."""
    import transformers

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,  # pyright: ignore[reportAttributeAccessIssue]
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "attention_backends": [backend for backend in BACKEND_FUNCTIONS if backend_available(backend)],
        "date": datetime.now(UTC).date().isoformat(),
    }
