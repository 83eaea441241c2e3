"""Ways to move bytes once the shard has decided what moves."""
