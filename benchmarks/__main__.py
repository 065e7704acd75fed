"""Run the benchmarks of the buffer, and print a table for each."""

from benchmarks import ingest, latency

if __name__ == "__main__":
    ingest.main()
    latency.main()
