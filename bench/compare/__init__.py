"""The same work on this store and on others that run on the same machine."""
