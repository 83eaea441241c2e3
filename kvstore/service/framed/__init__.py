"""The fast channel's door: a framed socket beside gRPC, to the same handlers (docs/fast-channel.md)."""
