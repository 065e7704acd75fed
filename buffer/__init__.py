"""The replay buffer: keeps every trajectory in SQLite and hands out groups to train on."""
