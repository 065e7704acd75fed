"""A recorded run as the buffer of an offline trainer."""
