"""Messages, their encoding, sockets, and the client of the buffer."""
