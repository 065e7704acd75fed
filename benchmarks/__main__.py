"""Run every benchmark that needs nothing but tba, each with its table; the others are `make bench-peers`."""

from benchmarks import delta, ingest, latency, publish, scale, spool

if __name__ == "__main__":
    ingest.main()
    latency.main()
    scale.main()
    spool.main()
    delta.main()
    publish.main()
