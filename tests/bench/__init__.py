"""The gateway's cost beside a direct call, nginx, and any other gateway: `python -m tests.bench`."""
