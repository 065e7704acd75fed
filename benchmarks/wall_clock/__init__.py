"""Time to a held-out accuracy: asynchronous against synchronous, at the pace of a GPU node."""
