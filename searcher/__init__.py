"""The searcher: generates responses with the newest weights, scores them, and puts them in the buffer."""
