"""Every workload over every transport, part size, batch and number of clients, beside the ceilings of the same run."""
