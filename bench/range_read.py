"""1% random rows of an array in S3, against downloading it.

The S3 is moto's server; a proxy before it adds 50 ms to each request, and has a link of 1 Gbit/s
that all answers share. The array is read by `clamor.from_file(...)` and `clamor.gather` of rows
that nobody has read before. It is downloaded whole by boto3's own `download_fileobj` (parts of 8
MiB, ten at once) and by one GET; the faster of the two counts.

range_read   of each size of a row: seconds of the download / of the rows. Medians.

What bounds small rows here is moto, a Python program that answers some hundred requests in a
second: `requests_s` says how many it has answered.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from typing import Any

import numpy as np

from bench.support import common
from bench.support.common import emit, note, verify

SHARE = 0.01
ROW_KIB = (256, 64, 8)
OPTIONS = {"access_key_id": "bench", "secret_access_key": "bench", "region": "us-east-1"}


def store(endpoint: str, array: Any) -> None:
    """Puts it as bucket/x.npy."""
    import boto3

    body = io.BytesIO()
    np.save(body, array)
    body.seek(0)
    client = client_of(boto3, endpoint)
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="x.npy", Body=body)


def client_of(boto3: Any, endpoint: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=OPTIONS["access_key_id"],
        aws_secret_access_key=OPTIONS["secret_access_key"],
        region_name=OPTIONS["region"],
    )


def downloads(endpoint: str, array: Any) -> dict[str, float]:
    """Seconds of each way."""
    import boto3

    client, took = client_of(boto3, endpoint), {}
    client.head_object(Bucket="bucket", Key="x.npy")
    for way in ("parts", "one GET"):
        out = io.BytesIO()
        began = time.perf_counter()
        if way == "parts":
            client.download_fileobj("bucket", "x.npy", out)
        else:
            out.write(client.get_object(Bucket="bucket", Key="x.npy")["Body"].read())
        took[way] = time.perf_counter() - began
        out.seek(0)
        verify(f"a download by {way}", np.load(out)[:3], array[:3])
    return took


def read_rows(endpoint: str, array: Any, n_rows: int, seed: int) -> float:
    """Seconds until the rows of a variable that nobody has read are here."""
    import clamor_ray as clamor

    options = {**OPTIONS, "endpoint": endpoint}
    ref = clamor.from_file("s3://bucket/x.npy", storage_options=options)
    rows = np.random.default_rng(seed).choice(len(array), n_rows, replace=False)
    began = time.perf_counter()
    got = clamor.gather(ref, rows)
    took_s = time.perf_counter() - began
    verify("the rows", got, array[rows])
    clamor.free(ref)
    return took_s


def figures(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The summary, of the lines of all sizes."""
    return {
        "range_read": {
            f"{each['row_kib']} KiB": statistics.median(each["download_s"])
            / statistics.median(each["rows_s"])
            for each in records
        }
    }


def main(arguments: list[str]) -> int:
    """Runs all sizes and prints the summary."""
    parser = argparse.ArgumentParser(prog="python -m bench range_read", description=__doc__)
    parser.add_argument("--small", action="store_true", help="32 MiB, once")
    parser.add_argument("--mib", type=int, help="of the array (1024)")
    parser.add_argument("--latency-ms", type=float, default=50.0, help="of a request (50)")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of the link (1000)")
    parser.add_argument("--repetitions", type=int, help="of each (3)")
    options = parser.parse_args(arguments)
    n_bytes = (options.mib or (32 if options.small else 1024)) << 20
    repetitions = options.repetitions or (1 if options.small else 3)

    import clamor_ray as clamor
    from tests.support.s3_rig import far_server

    environment = common.environment(library=clamor.__version__, bench="range_read")
    environment["environment"] |= {"latency_ms": options.latency_ms, "mbit": options.mbit}
    records: list[dict[str, Any]] = []
    with (
        far_server(options.latency_ms / 1e3, options.mbit * 125e3) as (near, far),
        common.several_nodes(1, 100 << 20) as nodes,
    ):
        environment["environment"]["trap"] = nodes.trap
        emit(environment)
        for row_kib in ROW_KIB:
            note(f"rows of {row_kib} KiB")
            array = common.make_array(n_bytes, row_kib).reshape(-1, row_kib << 7)
            store(near, array)
            record: dict[str, Any] = {"row_kib": row_kib, "n_bytes": n_bytes}
            record["n_rows"] = n_rows = max(1, int(len(array) * SHARE))
            took = [downloads(far, array) for _ in range(repetitions)]
            record["download_s"] = [min(each.values()) for each in took]
            record["ways_s"] = took
            record["rows_s"] = [read_rows(far, array, n_rows, seed) for seed in range(repetitions)]
            record["requests_s"] = n_rows / min(record["rows_s"])
            records.append(record)
            emit(record)
    common.summary(figures(records))
    return 0
