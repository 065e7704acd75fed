"""One module per kind of page: functions from a request to a response, run in threads of their own."""
