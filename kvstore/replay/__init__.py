"""Replay of a trace against a real shard by real worker processes (docs/replay.md)."""
