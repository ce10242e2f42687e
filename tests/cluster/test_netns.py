"""On links of their own at 1 Gbit/s: what a task does not touch does not cross the network."""

from __future__ import annotations

import json

import pytest

from tests.support.lab import netns_cluster, require_lab

pytestmark = [pytest.mark.lab, pytest.mark.root]

N_BLOCKS = 16384
BLOCK = 4096

# A driver on node 0. Between its two prints, tasks on the other nodes read 1% of the blocks.
_SPARSE = """
import hashlib, json, sys
import numpy as np, ray
import clamor_ray as clamor

N_BLOCKS, BLOCK = int(sys.argv[1]), 4096
ray.init(address="auto", log_to_driver=False)
trap = clamor.init().trap
image = np.random.default_rng(5).integers(1, 256, N_BLOCKS * BLOCK, dtype=np.uint8)
ref = clamor.put(image)

@clamor.remote(num_cpus=0)
def read(array, seed, prefetched):
    n_blocks = len(array) // 4096
    chosen = np.sort(np.random.default_rng(seed).permutation(n_blocks)[: n_blocks // 100])
    rows = [array[block * 4096 : (block + 1) * 4096] for block in chosen]
    if prefetched:
        clamor.prefetch(rows)
    node = ray.get_runtime_context().get_node_id()
    return node, hashlib.sha256(b"".join(rows)).hexdigest()

def expect(seed):
    chosen = np.sort(np.random.default_rng(seed).permutation(N_BLOCKS)[: N_BLOCKS // 100])
    return hashlib.sha256(image.reshape(-1, BLOCK)[chosen].tobytes()).hexdigest()

answers = {
    node: read.options(resources={f"node{node}": 0.01}).remote(ref, node, node == 2)
    for node in (1, 2)
}
nodes = {}
for node, answer in answers.items():
    nodes[node], digest = ray.get(answer, timeout=120)
    assert digest == expect(node), f"node {node} read something else"
engines = {entry.node_id: dict(entry.engine) for entry in clamor.stats().nodes}
print("RESULT", json.dumps([nodes, engines]))
"""


@pytest.mark.slow
def test_only_what_is_touched_crosses_a_link() -> None:
    require_lab("netns")
    with netns_cluster(3, rate="1gbit") as lab:
        # Ray's own traffic, and a worker's start, on the same link.
        lab.run_python("import ray; ray.init(address='auto', log_to_driver=False)")
        before = {node: lab.received_bytes(node) for node in (1, 2)}
        sent = lab.shaped_bytes(0)
        printed = lab.run_python(_SPARSE, str(N_BLOCKS))
        (line,) = (line for line in printed.splitlines() if line.startswith("RESULT "))
        nodes, engines = json.loads(line.removeprefix("RESULT "))
        touched = N_BLOCKS // 100 * BLOCK
        for node, most in ((1, 2.5), (2, 1.1)):  # plain touches; prefetched
            assert nodes[str(node)] == lab.node_ids[node]
            received = engines[lab.node_ids[node]]["bytes_received"]
            assert touched <= received <= most * touched, node
            crossed = lab.received_bytes(node) - before[node]
            # Ray sends each node some of its own; the whole array would be 64 MiB.
            assert received <= crossed <= received + (6 << 20), (node, received, crossed)
        assert 2 * touched <= lab.shaped_bytes(0) - sent < 16 << 20
