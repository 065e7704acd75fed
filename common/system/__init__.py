"""Processes, devices, memory and files of the operating system."""
