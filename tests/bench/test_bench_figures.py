"""From what benchmarks measured to their figures: pure."""

from __future__ import annotations

import numpy as np
import pytest

from bench import beyond, drain, first_touch, hot_pages, idle, metrics, serve_load
from bench.drivers import beyond_cases, drain_driver, first_touch_driver, hot_driver
from bench.peers import redis
from bench.support import common
from clamor_ray._objects.hashtable import Table
from clamor_ray.workloads.data.stream import first_value, key_of


def hot_run(hosts: int, seconds: float, replication: str = "p2c") -> dict[str, object]:
    return {
        "side": "clamor",
        "replication": replication,
        "hosts": hosts,
        "seconds": seconds,
        "touched_bytes": [100] * (hosts - 2) + [120],
        "distinct_bytes": 130,
    }


def test_the_ideal_is_the_busiest_link() -> None:
    two, eight = hot_run(2, 1.0), hot_run(8, 1.0)
    assert hot_pages.ideal_s(two, 10.0) == {
        "into_a_host": 12.0,
        "out_of_home": 13.0,
        "all_links": 6.0,
    }
    assert hot_pages.ideal_s(eight, 10.0)["into_a_host"] == 12.0
    assert hot_pages.ideal_s(eight, 10.0)["all_links"] == pytest.approx((6 * 100 + 120) / 80)


def test_hot_page_figures_compare_medians_at_the_most_hosts() -> None:
    runs = [hot_run(2, 20.0), *(hot_run(8, seconds) for seconds in (26.0, 13.0, 39.0))]
    runs += [hot_run(8, 130.0, "off"), hot_run(8, 52.0, "random")]
    runs.append({"side": "ray", "hosts": 8, "seconds": 2600.0})
    assert hot_pages.figures(runs, 10.0) == {
        "ideal_ratio": 2.0,
        "growth": 1.3,
        "off_speedup": 5.0,
        "random_speedup": 2.0,
        "ray_speedup": 100.0,
    }


def test_popular_keys_lie_on_the_share_of_blocks_that_was_asked_for() -> None:
    keys = key_of(np.arange(200_000))
    table = Table.build(keys, first_value(keys), len(keys))
    popular = hot_driver.popular_keys(table, 0.05, np.random.default_rng(1))
    n_blocks = table.slots.nbytes // 4096
    blocks = np.unique(table.starts(popular) >> np.uint64(12))
    assert len(blocks) == pytest.approx(0.05 * n_blocks, rel=0.03)
    assert len(np.unique(popular)) == len(popular) > 50 * len(blocks)
    # In scattered places: hardly one has its neighbour beside it.
    assert np.count_nonzero(np.diff(blocks) == 1) < len(blocks) / 5


def test_a_slope_has_an_error() -> None:
    assert idle.slope([0, 10, 20], [5, 25, 45]) == (2.0, 0.0)
    rise, error = idle.slope([0, 1, 2, 3], [0, 1, 0, 1])
    assert (rise, error) == pytest.approx((0.2, np.sqrt(0.8 / 2 / 5)))
    with pytest.raises(ValueError, match="three samples"):
        idle.slope([0, 1], [0, 1])


def test_what_metrics_cost_is_between_pairs_of_sessions() -> None:
    def session(switch: str, us: float, server: float, registry: float) -> dict[str, object]:
        percents = {"page_server_0": server, "page_server_1": server, "registry": registry}
        return {"metrics": switch, "took_us": [us, us, 900.0], "percents": percents}

    pairs = [("on", 30.0, 1.5, 2.0), ("off", 20.0, 1.0, 1.0)] * 2
    found = metrics.figures([session(*each) for each in [*pairs, *reversed(pairs[:2])]])
    assert found == {"fault_ratio": 1.5, "core_percent": 0.5, "registry_core_percent": 1.0}


@pytest.mark.parametrize(("per_sample_kib", "says"), [(0, "none"), (-5, "none"), (5, "growth")])
def test_growth_is_what_stands_out_of_the_noise(per_sample_kib: int, says: str) -> None:
    noise = np.random.default_rng(1).normal(0, 4, 60)
    samples = [
        {
            "seconds": 10.0 * at,
            "memory_bytes": 1e9 + (per_sample_kib * at + noise[at]) * 1024,
            "private_bytes": {"driver": 1e8, "keeper": 1e6},
            "peer_bytes": 1e7,
            "descriptors": {"driver": 10 + (at > 50), "keeper": 1},
            "threads": {"driver": 7, "keeper": 1},
        }
        for at in range(60)
    ]
    detail, summary = idle.figures(samples)
    assert detail["memory"]["says"] == says
    assert summary["growth_kib_per_minute"] == pytest.approx(6 * per_sample_kib, abs=1.5)
    assert (summary["descriptors"], summary["threads"]) == (0, 0)


def test_what_ray_grows_by_is_taken_off_each_process_with_ray_in_it() -> None:
    samples = [
        {
            "seconds": 60.0 * at,
            "memory_bytes": 1e9 + 2 * 1024 * at + 3 * 1024 * at,
            "private_bytes": {"driver": 1e8, "registry": 1e8, "keeper_0": 1e6},
            "peer_bytes": 1e7 + 1024 * at,
            "descriptors": {"driver": 1, "registry": 1, "keeper_0": 1},
            "threads": {"driver": 1, "registry": 1, "keeper_0": 1},
        }
        for at in range(10)
    ]
    detail, summary = idle.figures(samples)
    assert summary["growth_kib_per_minute"] == pytest.approx(3)
    assert detail["with_ray"]["kib_per_minute"] == pytest.approx(5)
    assert detail["peer"]["kib_per_minute"] == pytest.approx(1)


def test_what_grows_late_is_seen() -> None:
    assert idle.growth([4] * 40 + [5] * 20) == 1
    assert idle.growth([4, 9, 4, 4, 4, 4, 4, 4, 4]) == 0


def test_words_by_index_are_the_words_in_order() -> None:
    want = common.expected_words(0, 4096, 9)
    indices = np.random.default_rng(1).integers(0, 4096, (50, 3))
    np.testing.assert_array_equal(common.expected_at(indices, 9), want[indices])


def test_redis_keys_have_eight_bytes_each() -> None:
    ids = np.array([0, 255, 1 << 40])
    assert redis.keys_of(ids) == [int(i).to_bytes(8, "little") for i in ids]


def first_touch_reading(
    way: str, seconds: float, ratio: float, page: object = "auto", share: float = 0.1
) -> dict[str, object]:
    return {
        "row_bytes": 256,
        "share": share,
        "order": "random",
        "way": way,
        "page_bytes": page,
        "seconds": seconds,
        "fetch_ratio": ratio,
    }


def test_first_touch_figures_are_of_the_worst_case_up_to_a_tenth() -> None:
    readings = [
        first_touch_reading("index", 1.0, 0.5),
        first_touch_reading("ray", 4.0, 0.0),
        first_touch_reading("index", 1.0, 0.7, share=0.01),
        first_touch_reading("ray", 3.0, 0.0, share=0.01),
        first_touch_reading("gather", 1.0, 0.9),
        first_touch_reading("loop", 3.0, 1.6),
        first_touch_reading("loop", 2.0, 9.0, 65536),
        first_touch_reading("loop", 2.5, 1.0, 4096),
        *(first_touch_reading(way, 1.0, 99.0, share=0.5) for way in ("index", "loop", "ray")),
        {"row_bytes": 256, "present": {"ids_1000": 1.2, "scalar": 1.1, "slice": 1.3}},
        {"row_bytes": 256, "present": {"ids_100000": 2.9, "small_pages_1000": 1.02}},
        {"leak": 0, "seconds": 3.5},
    ]
    assert first_touch.figures(readings) == {
        "fetch_ratio": 0.9,
        "loop_fetch_ratio": 1.6,
        "loop_ratio": 1.5,
        "present_ratio": 2.9,
        "paged_ratio": 1.02,
        "scalar_ratio": 1.1,
        "slice_ratio": 1.3,
        "leak": 0,
        "leak_s": 3.5,
        "index_speedup": 3.0,
    }


def test_first_touch_counts_the_blocks_that_rows_lie_on() -> None:
    ids = np.array([0, 3, 4, 40])
    blocks = first_touch_driver.blocks_of(ids, row_bytes=1024, begin=0)
    assert blocks.tolist() == [0, 1, 10]
    # Row 3 begins in the first block and ends in the second.
    shifted = first_touch_driver.blocks_of(ids, row_bytes=1024, begin=64)
    assert shifted.tolist() == [0, 1, 10]
    assert first_touch_driver.blocks_of(ids[1:2], 1024, 64).tolist() == [0, 1]


@pytest.mark.parametrize("order", ["random", "sorted", "clustered"])
def test_first_touch_chooses_different_rows(order: str) -> None:
    ids = first_touch_driver.choose(order, 1 << 12, 0.05, np.random.default_rng(2))
    assert len(np.unique(ids)) == len(ids) == round((1 << 12) * 0.05)
    assert ids.min() >= 0
    assert ids.max() < 1 << 12
    assert (order == "sorted") == bool((np.diff(ids) > 0).all())
    neighbours = (np.diff(ids) == 1).mean()
    assert neighbours > 0.9 if order == "clustered" else neighbours < 0.2


def test_drain_counts_what_was_under_way_while_it_ran() -> None:
    times = np.array([(0, 10), (5, 21), (20, 25), (29, 40), (30, 31), (7, 90)])
    assert drain_driver.within(times, 20, 30).tolist() == [[5, 21], [20, 25], [29, 40], [7, 90]]


def test_drain_latencies_are_some_that_were_measured() -> None:
    begin = np.arange(2001) * 10**9
    took_ns = np.arange(1, 2002) * 10**6
    found = drain_driver.latencies(np.stack([begin, begin + took_ns], axis=1))
    assert found == {"p50_ms": 1001, "p99_ms": 1981, "p999_ms": 1999, "max_ms": 2001, "n": 2001}


def test_drain_figures_are_of_the_raw_stream_and_of_both_phases() -> None:
    run = {
        "bytes_per_s": 90e6,
        "before": {"read": {"p999_ms": 2.0}, "commit": {"p999_ms": 9.0}},
        "during": {"read": {"p999_ms": 20.0}, "commit": {"p999_ms": 90.0}},
    }
    assert drain.figures(run, 120e6) == {
        "evacuation_share": 0.75,
        "read_stall_ms": 20.0,
        "commit_stall_ms": 90.0,
        "read_before_ms": 2.0,
        "commit_before_ms": 9.0,
    }


def beyond_case(system: str, factor: float, seconds: float) -> dict[str, object]:
    return {
        "system": system,
        "factor": factor,
        "n_bytes": int(100 * factor),
        "sort_s": seconds,
        "scan_s": seconds / 10,
    }


def test_what_is_beyond_memory_is_compared_where_both_ended() -> None:
    records = [beyond_case("clamor", *case) for case in ((0.5, 1.0), (2.0, 6.0), (4.0, 20.0))]
    records += [beyond_case("duckdb", 4.0, 30.0), beyond_case("ray_data", 2.0, 60.0)]
    records.append({"system": "ray_data", "factor": 4.0, "failed": "no memory"})
    found = beyond.figures(records)
    assert found["beyond_slowdown"]["sort"] == pytest.approx(20 / 400 / (1 / 50))
    assert found["duckdb_speedup"] == {"sort": 1.5, "scan": 1.5}
    assert found["ray_speedup"] == {"sort": 10.0, "scan": 10.0}
    assert beyond.figures(records[:3])["ray_speedup"] == {"sort": 0.0, "scan": 0.0}


@pytest.mark.parametrize("n", [1, 1000, 5000, 20_011])
def test_parts_are_merged_whole(n: int) -> None:
    """Also where values are the same, and where the last part is shorter."""
    source = np.random.default_rng(n).integers(0, 1 << 40, n)
    source[: n // 3] = 7
    table, out = np.empty_like(source), np.empty_like(source)
    beyond_cases._merge(table, beyond_cases._runs(source, table, 1000), out)
    assert np.array_equal(out, np.sort(source))


def test_the_p99_of_all_windows_is_compared() -> None:
    slow, fast = {"latencies_ms": [8.0] * 10}, {"latencies_ms": [1.0] * 990}
    control = {"latencies_ms": [2.0] * 1000}
    assert serve_load.p99_ratio([(fast, control), ({"latencies_ms": [1.0]}, control)]) == 0.5
    assert serve_load.p99_ratio([(slow, control), (fast, control)]) == 0.5
    assert serve_load.p99_ratio([(slow, control), (slow, control), (fast, control)]) == 4.0


def test_requests_per_second_are_compared_by_their_size() -> None:
    per_s = {"clamor": {16: 30.0, 1024: 8.0}, "redis": {16: 20.0, 1024: 4.0}}
    found = serve_load.rps_ratios({**per_s, "actor": {16: 10.0, 1024: 1.0}})
    assert found == {"redis 16": 1.5, "redis 1024": 2.0, "actor 16": 3.0, "actor 1024": 8.0}
