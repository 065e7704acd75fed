"""Run every benchmark and print its table with the machine."""

import os
import platform

from benchmarks import ingest


def main() -> None:
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    ingest.main()


if __name__ == "__main__":
    main()
