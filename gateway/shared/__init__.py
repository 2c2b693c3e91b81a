"""What gateways share through a Redis server: the connection to it, and who takes part in a run."""
