"""The threads between socket and disk: network, writer, syncer and checkpointer, and the queue between them."""
