"""Hit rates of eviction policies on traces, beside what an oracle reaches."""
