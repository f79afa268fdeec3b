"""Print the Job of kubernetes.yaml for one run: with its name, YAML and overrides, and with BUCKET from the environment.

python recipes/launch/kubernetes_job.py NAME FILE.yaml [key=value ...] | kubectl apply -f -
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml

JOB = Path(__file__).with_name("kubernetes.yaml")
_NAME = "biphasic"
"""The name of the Service and the Job in the file."""


def resources(name: str, arguments: list[str], bucket: str | None) -> list[dict[str, Any]]:
    """Return the file's Service and Job for one run. Everything else is as in the file.

    Args:
        name: the run's name. Characters that Kubernetes doesn't allow become hyphens.
        arguments: of node.sh.
        bucket: the value of `BUCKET`; None keeps that of the file.
    """
    own = f"{_NAME}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
    service, job = yaml.safe_load_all(JOB.read_text(encoding="utf-8"))
    service["metadata"]["name"] = job["metadata"]["name"] = own
    service["spec"]["selector"]["job-name"] = own
    pod = job["spec"]["template"]["spec"]
    pod["subdomain"] = own
    [container] = pod["containers"]
    container["args"] = arguments
    for variable in container["env"]:
        if variable["name"] == "MASTER_ADDR":
            variable["value"] = f"{own}-0.{own}"
        elif variable["name"] == "BUCKET" and bucket is not None:
            variable["value"] = bucket
    return [service, job]


def main(arguments: list[str]) -> int:
    """Print the resources."""
    if len(arguments) < 2:
        print("usage: kubernetes_job.py NAME FILE.yaml [key=value ...]", file=sys.stderr)
        return 2
    name, *others = arguments
    words: list[str] = []
    for argument in others:
        # A study gives all overrides in one word.
        parts = argument.split()
        words += parts if all(re.match(r"[\w.-]+=", part) for part in parts) else [argument]
    print(yaml.safe_dump_all(resources(name, words, os.environ.get("BUCKET")), sort_keys=False, width=1000), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
