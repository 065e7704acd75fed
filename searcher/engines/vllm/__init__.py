"""The vLLM engine: generation, hot reload of weights, and the code that runs inside vLLM's workers."""
