"""detgate: a deterministic inference gateway in front of vLLM and SGLang replicas."""

__version__ = "0.1.0"
