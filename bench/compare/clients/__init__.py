"""One process a store: each runs in the environment that its library needs, beside `work` alone."""
