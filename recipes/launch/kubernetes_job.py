"""Print the Job of kubernetes.yaml for one run: with its name and arguments, and BUCKET and RUN_YAML of the environment.

python recipes/launch/kubernetes_job.py NAME FILE.yaml [key=value ...] | kubectl apply -f -
"""

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

JOB = Path(__file__).with_name("kubernetes.yaml")
_NAME = "biphasic"
"""The name of the Service and the Job in the file."""
_LONGEST = 59
"""A host's name has at most 63 characters: that of the Job, a hyphen and the pod's number."""


def resources(name: str, arguments: list[str], variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the file's Service and Job for one run. Everything else is as in the file.

    Args:
        name: the run's name. If Kubernetes doesn't allow it, hyphens replace characters, it is cut, and a hash tells it
            from others.
        arguments: of node.sh.
        variables: values of the container's variables, in place of those of the file.
    """
    own = f"{_NAME}-{name}"
    if not re.fullmatch(rf"[a-z0-9-]{{1,{_LONGEST - 1}}}[a-z0-9]", own):
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        part = re.sub(r"[^a-z0-9]+", "-", name.lower())[: _LONGEST - len(f"{_NAME}--{digest}")].strip("-")
        own = "-".join(filter(None, (_NAME, part, digest)))
    service, job = yaml.safe_load_all(JOB.read_text(encoding="utf-8"))
    service["metadata"]["name"] = job["metadata"]["name"] = own
    service["spec"]["selector"]["job-name"] = own
    pod = job["spec"]["template"]["spec"]
    pod["subdomain"] = own
    [container] = pod["containers"]
    container["args"] = arguments
    values = {**variables, "MASTER_ADDR": f"{own}-0.{own}"}
    for variable in container["env"]:
        if variable["name"] in values:
            variable["value"] = values[variable["name"]]
    return [service, job]


def main(arguments: list[str]) -> int:
    """Print the resources."""
    if len(arguments) < 2:
        print("usage: kubernetes_job.py NAME FILE.yaml [key=value ...]", file=sys.stderr)
        return 2
    name, *words = arguments
    variables = {key: os.environ[key] for key in ("BUCKET", "RUN_YAML") if key in os.environ}
    print(yaml.safe_dump_all(resources(name, words, variables), sort_keys=False, width=100_000), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
