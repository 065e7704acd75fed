"""An example of each message that may be sent."""

from tba.common.wire import messages
from tba.common.wire.messages import Archive, GetStatus, HeldOutResponse, Movable, PutEvaluation
from tba.common.wire.trajectory import RowNumbers

REF = messages.WeightsRef(version=7, step=14, path="/s/v00000007", manifest_sha256="ab" * 32)
STATE = messages.RunState(weights=REF, step=14, finished=False)

# One of each request and reply. If these bytes change, the protocol changes: raise its version.
REQUESTS = {
    "hello": messages.Hello(host="node", pid=42),
    "register_prompts": messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=1, offset=0, keys=["p0"]),
    "lease_prompts": messages.LeasePrompts(want=2, held=[3], weights_version=7, wait_seconds=1.0),
    "sample_batch": messages.SampleBatch(step=14, prompts=2, samples=4, reference="initial", wait_seconds=0.5),
    "report_step": messages.ReportStep(
        step=14,
        metrics={"loss": 0.5},
        reference="initial",
        trajectory_ids=[9],
        reference_logprobs=[-1.5],
        rows=RowNumbers(
            logprob=[-2.5],
            log_ratio=[0.25],
            advantage=[-0.5],
            weight=[1.0],
            mismatch=[None],
            skipped=[False],
            # 0.5 and -0.25.
            token_log_ratios=[bytes.fromhex("003800b4")],
        ),
    ),
    "archive": Archive(
        since_step=14, url="s3://bucket/000000000009-0a1b2c3d.parquet", trajectories=[9, 11], complete=True
    ),
    "announce_snapshot": messages.AnnounceSnapshot(weights=REF, bytes=100),
    "finish_run": messages.FinishRun(step=15),
    "heartbeat": messages.Heartbeat(
        activity="waiting",
        reason="prompts",
        weights_version=None,
        metrics={"x": 1.0},
        serves="tcp://n:1",
        warning="old answers",
    ),
    "goodbye": messages.Goodbye(),
    "get_status": GetStatus(),
    "put_evaluation": PutEvaluation(
        version=7,
        step=14,
        prompts=32,
        prompt_set="0f",
        settings="1e",
        evaluated_at=5.0,
        seconds=0.5,
        metrics={"accuracy": 0.5},
        intervals={"accuracy": (0.25, 0.75)},
        not_measured="1 of 2 responses could not be scored: ConnectError",
        responses=[
            HeldOutResponse(
                prompt="p", prompt_text="1+1=", answer="2", response="3", reward=0.0, reward_parts={"correct": 0.0}
            )
        ],
    ),
}
REPLIES = {
    "welcome": messages.Welcome(run_name="demo", next_version=8, recorded_steps=15),
    "registered": messages.Registered(known=1, complete=True),
    "leases": messages.Leases(visits=[messages.Visit(lease=5, epoch=0, prompt_key="p0")], reason=""),
    "put_ack": messages.PutAck(first_sequence=0, stored=4, duplicates=0),
    "movable": Movable(trajectories=[9, 11], after=11),
    "not_ready": messages.NotReady(reason="3 of 7 prompts have trajectories"),
    "sources": messages.Sources(addresses=["tcp://node:5759"]),
    "done": messages.Done(),
    "failure": messages.Failure(code="malformed", message="field body: missing"),
}


FILE_MESSAGES = {
    "fetch_chunk": messages.FetchChunk(version=7, file="model.safetensors", offset=1 << 33, length=1 << 20),
    "chunk": messages.Chunk(offset=1 << 33, file_bytes=(1 << 33) + 3),
    "failure": REPLIES["failure"],
}
