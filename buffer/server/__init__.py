"""The threads between socket and disk, network and writer, and the queue between them."""
