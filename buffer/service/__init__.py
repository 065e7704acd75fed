"""Request handlers: one request in, one reply out. No sockets, no threads."""
