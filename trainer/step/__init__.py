"""One optimiser step: gradient accumulation, clipping, schedule, metrics."""
