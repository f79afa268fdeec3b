"""The plan of a job that is no pretraining run: lines by topic, what is missing, and what would stop the job."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass
class JobPlan:
    """What a job will read, do and write.

    Attributes:
        run: the run's folder.
        job: value of the YAML's `job`.
        lines: one line for each topic.
        missing: what has to be made before the job can start.
        problems: what would stop the job although everything is there.
    """

    run: str
    job: str
    lines: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return the plan as text."""
        lines = [f"{self.run}: {self.job}"]
        lines += [f"  {topic:<14} {line}" for topic, line in self.lines.items()]
        lines += [f"  MISSING        {missing}" for missing in self.missing]
        lines += [f"  PROBLEM        {problem}" for problem in self.problems]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self), indent=2)
