"""The launch profiles of SGLang, read by SGLang's own parser."""

from __future__ import annotations

import subprocess

import pytest

from tests.engines.parsed import parsed, profiles, words

pytestmark = pytest.mark.smoke


def test_its_parser_takes_every_flag_for_what_it_says() -> None:
    wanted = profiles("sglang")
    for profile, taken in zip(wanted, parsed("sglang", [words(profile) for profile in wanted]), strict=True):
        given = {flag.name: flag.value for flag in profile.flags}
        assert taken["enable_deterministic_inference"] is True
        assert taken["attention_backend"] == given["--attention-backend"]
        assert taken["sampling_backend"] == "pytorch"
        assert taken["sampling_defaults"] == "openai"
        assert taken["random_seed"] == 0
        assert taken["disable_radix_cache"] is True
        assert taken["tp_size"] == profile.wish.tensor_parallel
        assert taken["is_embedding"] is (profile.role == "reward")
        assert taken["max_running_requests"] == (1 if profile.role == "reward" else None)


def test_its_parser_refuses_what_is_no_flag() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        parsed("sglang", [["--enable-determinism"]])
