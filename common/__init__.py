"""What the processes share: messages, channels, the buffer client, snapshots, configuration, errors."""
