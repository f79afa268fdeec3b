"""What stores promise that answer as S3 does, or as Azure or Google do, and how Biphasic's tests end on each.

Servers run on this machine, one after the other: those of `tests/helpers/store_servers.py` that are installed (`make
stores`). Each promise is tried with boto3 alone; then `biphasic preflight`'s own check says what it finds, two starts of a
run try to lock one folder at once, and the tests that run on each kind of store are run on this one.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workload import ROOT, report, say

sys.path.insert(0, str(ROOT / "tests"))
KEYS, WRITES = 2_000, 50
TESTS = ("storage/test_stores.py", "conversion/test_s3.py", "export/test_bucket.py", "sweep/test_run.py",
         "data/test_streaming.py", "checkpointing/test_fetch.py", "checkpointing/test_merge.py",
         "faults/test_other_stores.py")  # fmt: skip
LOCK = """
import sys, time
from biphasic.checkpointing.run_lock import RunLock
from biphasic.errors import UserError
lock = RunLock(sys.argv[1])
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
try:
    lock.acquire(1)
except UserError as error:
    sys.exit("is locked by a running process" not in str(error))
time.sleep(5)
lock.release("finished")
print("locked")
"""
CLOCK = """
import sys
from biphasic.storage import open_store
place = open_store(sys.argv[1])
place.write("clock", b"1")
print(place.read("clock") == b"1" and "works")
"""


def s3_client(**settings: Any) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(retries={"total_max_attempts": 1}, **settings)
    return boto3.Session().client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"], config=config)


def conditional_put(client: Any, **condition: str) -> str:
    """What a store does with a write whose condition doesn't hold."""
    from botocore.exceptions import ClientError

    client.put_object(Bucket="bucket", Key="condition", Body=b"old")
    try:
        client.put_object(Bucket="bucket", Key="condition", Body=b"new", **condition)
    except ClientError as error:
        code = error.response["Error"]["Code"]
        return "kept" if code == "PreconditionFailed" else code
    return "**ignored**"


def list_after_write(client: Any) -> str:
    missed = 0
    for number in range(WRITES):
        client.put_object(Bucket="bucket", Key=f"after/{number}", Body=b"1")
        listed = client.list_objects_v2(Bucket="bucket", Prefix="after/").get("Contents", [])
        missed += f"after/{number}" not in [item["Key"] for item in listed]
    return f"{WRITES - missed} of {WRITES}"


def listed_keys(client: Any) -> str:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: client.put_object(Bucket="bucket", Key=f"many/{number:05d}", Body=b""), range(KEYS)))
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix="many/")
    return f"{len([item for page in pages for item in page['Contents']]):,}"


def aborted_upload(client: Any) -> str:
    """Whether the parts of an upload that was never completed are hidden, listed and removed."""
    upload = {"Bucket": "bucket", "Key": "parts/file"}
    upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
    client.upload_part(**upload, PartNumber=1, Body=b"part")
    if "Contents" in client.list_objects_v2(Bucket="bucket", Prefix="parts/"):
        return "**visible**"
    if len(client.list_multipart_uploads(Bucket="bucket", Prefix="parts/").get("Uploads", [])) != 1:
        return "not listed"
    client.abort_multipart_upload(**upload)
    left = client.list_multipart_uploads(Bucket="bucket", Prefix="parts/").get("Uploads", [])
    return "not aborted" if left else "aborted"


def etag(client: Any) -> str:
    """Whether a listing and a request for the file give one ETag, and it is the content's MD5."""
    import hashlib

    client.put_object(Bucket="bucket", Key="etag", Body=b"content")
    [item] = client.list_objects_v2(Bucket="bucket", Prefix="etag")["Contents"]
    same = item["ETag"].strip('"') == client.head_object(Bucket="bucket", Key="etag")["ETag"].strip('"')
    is_md5 = item["ETag"].strip('"') == hashlib.md5(b"content").hexdigest()
    return ("one" if same else "**two**") + (", MD5" if is_md5 else "")


def checksums(folder: Path, certificate: Path, address: str, mode: str) -> str:
    """Whether a file of 9 MiB arrives over HTTPS, in parts, with the checksums of this mode of boto3."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    config = Config(retries={"total_max_attempts": 1}, request_checksum_calculation=mode, response_checksum_validation=mode)
    client = boto3.Session().client("s3", endpoint_url=address, verify=str(certificate), config=config)
    (file := folder / "checksums").write_bytes(os.urandom(9 << 20))
    client.upload_file(str(file), "bucket", "checksums", Config=TransferConfig(max_concurrency=1))
    same = client.get_object(Bucket="bucket", Key="checksums")["Body"].read() == file.read_bytes()
    return "right" if same else "**wrong content**"


def tried(action: Callable[[], str]) -> str:
    """What an action returns, or the code of its error."""
    try:
        return action()
    except Exception as error:
        code = re.search(r"\((\w+)\) when calling the (\w+)", str(error))
        return f"{code[1]} ({code[2]})" if code else f"{type(error).__name__}: {str(error)[:60]}"


def clock(place: str, offset: str) -> str:
    if shutil.which("faketime") is None:
        return "not tried (no faketime)"
    command = ["faketime", "-f", offset, sys.executable, "-c", CLOCK, place]
    run = subprocess.run(command, capture_output=True, text=True)
    code = re.search(r"\((\w+)\) when calling|google::cloud::Status\((\w+)|\[(\w+)\]", run.stderr)
    return run.stdout.strip() or next((text for text in (code.groups() if code else ()) if text), run.stderr[-60:])


def two_starts(place: str, rounds: int = 3) -> str:
    """How many of the rounds end with one lock, of two processes that take it at the same moment."""
    import time

    right = 0
    for number in range(rounds):
        command = [sys.executable, "-c", LOCK, f"{place}/{number}", str(time.time() + 6)]
        starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = [start.communicate()[0] for start in starts]
        right += sum("locked" in output for output in outputs) == 1 and not any(start.returncode for start in starts)
    return f"{right} of {rounds}"


def run_tests(name: str) -> str:
    files = [str(ROOT / "tests" / file) for file in TESTS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "slow or not slow",
        "-k",
        name,
        *files,
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for line in re.findall(r"^(?:FAILED|ERROR) .*", run.stdout, re.MULTILINE):
        say(line)
    return ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|error)", run.stdout.splitlines()[-1]))


@contextmanager
def rclone(folder: Path) -> Iterator[dict[str, str]]:
    from helpers.s3_server import CREDENTIALS, serve_s3

    server, port = serve_s3(folder)
    try:
        yield {**CREDENTIALS, "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_MAX_ATTEMPTS": "1"}
    finally:
        server.terminate()
        server.wait(10)


def measure(name: str, folder: Path, tests: bool) -> dict[str, str]:
    from biphasic.storage.promises import broken_promises
    from helpers.buckets import make_bucket
    from helpers.https_server import forward_https
    from helpers.store_servers import SERVERS

    with ExitStack() as stack:
        environment = stack.enter_context({**SERVERS, "rclone": rclone}[name](folder))
        saved = dict(os.environ)
        stack.callback(lambda: (os.environ.clear(), os.environ.update(saved)))
        os.environ.update(environment)
        os.environ.pop("AWS_REQUEST_CHECKSUM_CALCULATION", None)
        place = make_bucket(f"{ {'azurite': 'az', 'google': 'gs'}.get(name, 's3') }://bucket")
        found: dict[str, str] = {}
        if place.startswith("s3://"):
            client = s3_client(request_checksum_calculation="when_required", response_checksum_validation="when_required")
            tries: dict[str, Callable[[], str]] = {
                "write only if absent": partial(conditional_put, client, IfNoneMatch="*"),
                "write only if unchanged": partial(conditional_put, client, IfMatch='"0"'),
                "listed once written": partial(list_after_write, client),
                f"{KEYS:,} keys listed": partial(listed_keys, client),
                "ETags": partial(etag, client),
                "upload left by a kill": partial(aborted_upload, client),
            }
            port = int(environment["S3_ENDPOINT_URL"].rpartition(":")[2])
            address, certificate = stack.enter_context(forward_https(port, folder))
            for mode in ("when_supported", "when_required"):
                tries[f"checksums {mode}"] = partial(checksums, folder, certificate, address, mode)
            found = {what: tried(action) for what, action in tries.items()}
        found |= {f"clock {offset}": clock(f"{place}/clock", offset) for offset in ("-1h", "+1h")}
        found["preflight"] = tried(lambda: "; ".join(broken_promises(f"{place}/preflight", "file")) or "no fault")
        found["two starts at once"] = two_starts(f"{place}/locks")
    if tests:
        found["tests"] = run_tests(name)
    return found


def versions(name: str) -> str:
    from helpers.premises_servers import version as version_of_server

    if name == "rclone":
        program = Path(sys.executable).parent / "rclone"
        return subprocess.run([program, "version"], capture_output=True, text=True).stdout.split()[1].lstrip("v")
    if name in ("moto", "google"):
        return version({"moto": "moto", "google": "gcp-storage-emulator"}[name])
    return version_of_server(name)


def main() -> None:
    from helpers.store_servers import STORES

    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stores", nargs="+", default=STORES, choices=STORES)
    parser.add_argument("--tests", nargs="*", default=STORES, choices=STORES, help="stores whose tests are run")
    options = parser.parse_args()
    numbers = {}
    for name in options.stores:
        say(f"{name}: promises{' and tests' * (name in options.tests)}")
        with tempfile.TemporaryDirectory() as folder:
            numbers[f"{name} {versions(name)}"] = measure(name, Path(folder), name in options.tests)
    names = list(dict.fromkeys(what for found in numbers.values() for what in found))
    rows = [[what, *(found.get(what, "-") for found in numbers.values())] for what in names]
    report("stores", "What stores promise", ["", *numbers], rows, numbers)


if __name__ == "__main__":
    main()
