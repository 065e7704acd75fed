"""The in-memory index of the trajectories that can be sampled, and the sampler that draws batches. No SQL."""
