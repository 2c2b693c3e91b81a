"""The run's record: one line of JSON when an index is claimed, one when its request has ended."""
