"""python -m bench NAME [--small] [...]"""

from __future__ import annotations

import importlib
import signal
import sys

from bench.support import common

NAMES = {
    "adaptive": "the page chosen by use against every fixed page, three kinds of readers",
    "autoscale": "how long a node stays that nothing uses, beyond the autoscaler's own time",
    "aggregate": "sums of arrays: by the driver, by a tree of tasks, and split",
    "allreduce": "sums over 2 to 8 members, against Open MPI, gloo, Ray (root for half of it)",
    "beyond": "a table larger than memory, sorted and scanned, against DuckDB and Ray Data (root)",
    "commit": "commits of one block and of many, first writes, building in place",
    "cold_read": "a large array read cold on another node, against ray.get",
    "drain": "everything off a node while others read and write (root)",
    "fetch": "a large prefetch against one raw TCP stream; 4 KiB pages per server core",
    "disk_cache": "a working set larger than a cache, with the cache's disk and without (root)",
    "first_touch": "some rows of a cold table, by every way to read them, against ray.get",
    "gather": "rows by id from another host, against Redis MGET and a Ray actor",
    "hot_pages": "Zipf look-ups from up to 8 hosts over shaped links, against the ideal (root)",
    "idle": "growth of memory, descriptors and threads over 10 minutes of churn",
    "faults": "latency of a node hit and of a remote fault, against the raw limits",
    "incremental": "refresh() after one of 1,000 read blocks changed, against all anew",
    "kmeans": "an iteration of k-means, against mpi4py and Spark",
    "learning": "lr, svm and lda end to end with split aggregation, against a tree of tasks",
    "metrics": "what metrics cost: of a fault, and of a node that does nothing else",
    "many": "put and free of thousands of small variables, against ray.put and an actor call",
    "overhead": "an empty @clamor.remote task with one GlobalRef, against an empty Ray task",
    "pressure": "PageRank with less local memory than its graph, by each policy of eviction",
    "program_moves": "programs whose partitions move and whose nodes come and go (root)",
    "program_peers": "rounds of k-means, lr and PageRank as programs, against mpi4py and Spark",
    "program_sim": "programs on 1,152 workers and more, simulated with their own code",
    "program_skew": "a program whose partitions have uneven work, cut four times finer",
    "programs": "rounds of small tasks, against Ray tasks and a Ray Compiled Graph",
    "query_share": "what one cold query of trees, indices and tables moves, of their bytes",
    "raid": "PageRank over variables with parity, against none; a host is killed (root)",
    "range_read": "1% random rows of an array in S3, against downloading it",
    "recipes": "what a task of a program costs beside its own work, on one node",
    "recovery": "k-means while a node is killed: what that iteration costs, what runs again",
    "serve_load": "an embedding service over HTTP, against a control, Redis and a Ray actor",
    "sim": "replication on 10 to 10,000 nodes, simulated with the engine's own choice",
    "sparse_lr": "sparse logistic regression, against a parameter server of Ray actors (root)",
    "spread": "cold readers and commits of a variable that is spread, against one home (root)",
    "store": "commits to a disk, openings and recovery, against dd, LMDB, SQLite, RocksDB",
    "straggler": "k-means with one busy node of four, with and without copies of slow tasks (root)",
    "update": "a hash map that changes between look-ups on three nodes, against ray.put anew",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print("usage: python -m bench NAME [--small] [--help]\n", file=sys.stderr)
        for name, what in NAMES.items():
            print(f"  {name:<13} {what}", file=sys.stderr)
        return 2
    # Asked to end, a benchmark takes down what it started, as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name = sys.argv[1]
    if "--help" not in sys.argv and "-h" not in sys.argv:
        common.keep_stdout()
    result = importlib.import_module(f"bench.{name}").main(sys.argv[2:])
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())
