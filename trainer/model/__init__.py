"""The policy: log-probabilities, packing, adapters, log Z, and the reference model."""
