"""Where a step's numbers go besides metrics.jsonl.

guarded.py               a thread and a queue around each sink: it can fail or hang, and training goes on
choose.py                from the configuration to sinks
sent.py                  which steps a tracker has already
tensorboard.py, weights_and_biases.py, trackio.py, prometheus.py
"""
