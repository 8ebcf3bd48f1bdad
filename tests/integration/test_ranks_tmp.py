import asyncio, subprocess, sys, os, time
from pathlib import Path
import pytest
from stored_run import StoredRun
from tiny_policy import write_tiny_policy
pytestmark = pytest.mark.integration

def test_ranks(mongo_uri, tmp_path):
    run = StoredRun(f"t{time.monotonic_ns()}", mongo_uri, write_tiny_policy(tmp_path / "base"), tmp_path)
    asyncio.run(run.fill(8))
    run.train()
    child = run.name + "_ranks"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "agentrl", "whatif", run.name, child, *run.here(), "--output_dir", str(tmp_path / child), "--steps", "4-4", "--loss_calculater", "CISPO"]
    found = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200)
    print(found.stdout[-3000:], found.stderr[-3000:])
    assert found.returncode == 0
    steps = asyncio.run(run.steps(child))
    print([(s.step, s.inherited, s.metrics.get("loss")) for s in steps], [s.metrics["loss"] for s in asyncio.run(run.steps())])
    asyncio.run(run.drop(child))
