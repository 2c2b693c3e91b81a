"""The numbers of several processes as one."""

from __future__ import annotations

import pickle

from gateway.telemetry import Telemetry, lasting, together


def counted(requests: int, seconds: float, up: float) -> Telemetry:
    telemetry = Telemetry()
    for _ in range(requests):
        telemetry.requests.add("policy", "/v1/chat/completions", "200")
        telemetry.lane_wait.observe(seconds, "policy")
    telemetry.gauge("detgate_in_flight", "", ("replica",), lambda: [(("policy-0",), requests)])
    telemetry.gauge("detgate_replica_up", "", ("replica",), lambda: [(("policy-0",), up)], "min")
    telemetry.gauge("detgate_sessions", "", (), lambda: [((), requests)], "max")
    return telemetry


def series(text: bytes) -> dict[str, float]:
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in text.decode().splitlines() if line[0] != "#")
    }


def test_counters_and_buckets_add_up_and_gauges_do_as_they_say() -> None:
    one, two = counted(3, 0.003, 1.0), counted(2, 20.0, 0.0)
    two.racing.add()
    found = series(one.exposition([pickle.loads(pickle.dumps(two.numbers()))]))
    assert found['detgate_requests_total{pool="policy",route="/v1/chat/completions",status="200"}'] == 5
    assert found["detgate_racing_total"] == 1
    assert found['detgate_lane_wait_seconds_bucket{le="0.005",pool="policy"}'] == 3
    assert found['detgate_lane_wait_seconds_bucket{le="+Inf",pool="policy"}'] == 5
    assert found['detgate_lane_wait_seconds_count{pool="policy"}'] == 5
    assert found['detgate_lane_wait_seconds_sum{pool="policy"}'] == 3 * 0.003 + 2 * 20.0
    assert found['detgate_in_flight{replica="policy-0"}'] == 5
    assert found['detgate_replica_up{replica="policy-0"}'] == 0
    assert found["detgate_sessions"] == 3
    assert series(one.exposition()).keys() <= found.keys()


def test_of_a_process_that_has_ended_its_gauges_do_not_count() -> None:
    one, dead = counted(1, 1.0, 1.0), lasting(counted(4, 1.0, 0.0).numbers())
    found = series(one.exposition([together((dead, dead), {})]))
    assert found['detgate_requests_total{pool="policy",route="/v1/chat/completions",status="200"}'] == 9
    assert found['detgate_in_flight{replica="policy-0"}'] == 1
    assert found['detgate_replica_up{replica="policy-0"}'] == 1
