"""Why a run stands still: one sentence that names the culprit and the remedy, from facts alone."""
