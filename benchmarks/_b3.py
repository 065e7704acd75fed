from benchmarks.ingest import *
import sys,subprocess,psutil,resource
if __name__=="__main__":
  for a in sys.argv[1:]:
    kib,count,p=map(int,a.split(","))
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        b=bare_loop(Path(folder)/"bare.sqlite",kib<<10,count)
        with Server(Path(folder) / "run") as server:
            pid=[q.pid for q in psutil.process_iter() if "buffer serve" in " ".join(q.cmdline()) and folder in " ".join(q.cmdline())][0]
            c0=psutil.Process(pid).cpu_times()
            r=server.ingest(p,count,kib<<10)
            c1=psutil.Process(pid).cpu_times()
            print(f"{a} bare {b:.0f} {r/b:.2f} {r:.0f} rows/s  server us/row: user {(c1.user-c0.user)/count*1e6:.1f} sys {(c1.system-c0.system)/count*1e6:.1f}",flush=True)
