"""Run every benchmark that needs only tba, and print a table for each."""

from benchmarks import delta, ingest, latency, publish, scale, spool

if __name__ == "__main__":
    ingest.main()
    latency.main()
    scale.main()
    spool.main()
    delta.main()
    publish.main()
