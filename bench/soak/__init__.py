"""Random clients over every transport, kills, stalls, cut connections and cancellations under memory pressure.

`python -m bench.soak [--seconds 600]`. Two real servers with small arenas, one that lets clients map its memory and one
that does not. Client processes - in an event loop, or with threads that block - match, get, put, acquire, look at
blocks in place, stall past their leases, cancel, and delete, by shared memory, regions, bulk and gRPC, in namespaces
that share their keys (one part a block, the same of another tenant, four parts a block, values of any size). A
tormentor kills, stops and resumes them; a proxy before the bulk port cuts and stalls connections; clients break their
own sockets in the middle of calls. Every byte read is checked against its key, tenant and part. At the end every client
is gone and each server must be as at the start: nothing leased or reserved, no session but the probe's, no region,
connection, descriptor or thread more than before, every arena byte free or evictable, and its memory no larger.
"""
