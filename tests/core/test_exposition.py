from __future__ import annotations

import pytest

from gateway.core import exposition

TEXT = """# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_running_total 99
vllm:num_requests_waiting{engine="0"} 2.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="False",engine="0"} 1.0
"""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("vllm:num_requests_running",), 4.0),
        (("vllm:num_requests_running", "vllm:num_requests_waiting"), 6.0),
        (("vllm:num_requests",), None),
        (("absent",), None),
        ((), None),
    ],
)
def test_the_samples_of_series_are_added_up(names: tuple[str, ...], expected: float | None) -> None:
    assert exposition.total(TEXT, names) == expected


def test_what_is_no_number_is_nothing() -> None:
    assert exposition.total("x many\n", ("x",)) is None


def test_a_label_is_read_from_the_first_sample() -> None:
    assert exposition.label(TEXT, "vllm:cache_config_info", "enable_prefix_caching") == "False"
    assert exposition.label(TEXT, "vllm:cache_config_info", "caching") is None
    assert exposition.label(TEXT, "absent", "engine") is None


def test_samples_are_added_up_by_one_label() -> None:
    text = """http_requests_total{handler="/classify",method="POST",status="2xx"} 4.0
http_requests_total{handler="/classify",method="POST",status="4xx"} 1.0
http_requests_total{handler="/v1/models",method="GET",status="2xx"} 2.0
http_requests_total_created{handler="/classify"} 1.7e9
"""
    assert exposition.by_label(text, "http_requests_total", "handler") == {"/classify": 5.0, "/v1/models": 2.0}
    assert exposition.by_label(text, "http_requests_total", "absent") == {}
    assert exposition.by_label('x{a="b"} many\n', "x", "a") == {}
