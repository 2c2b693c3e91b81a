"""Real servers, started when a test first asks for them and kept to the end of the run."""

from collections.abc import Iterator

import pytest

from tests.engines import servers
from tests.engines.servers import Server


@pytest.fixture(scope="session")
def vllm_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two equal vLLM replicas of tiny-llm in float32, whose answers do not depend on the batch."""
    with servers.running([servers.VLLM] * 2, tmp_path_factory.mktemp("vllm")) as started:
        yield started


@pytest.fixture(scope="session")
def vllm_reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A vLLM reward model of one label, without prefix cache."""
    with servers.running([servers.VLLM_REWARD], tmp_path_factory.mktemp("vllm-reward")) as [started]:
        yield started


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An SGLang replica of tiny-llm in deterministic mode."""
    with servers.running([servers.SGLANG], tmp_path_factory.mktemp("sglang")) as [started]:
        yield started


@pytest.fixture(scope="session")
def sglang_reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An SGLang reward model of one label, without radix cache."""
    with servers.running([servers.SGLANG_REWARD], tmp_path_factory.mktemp("sglang-reward")) as [started]:
        yield started
