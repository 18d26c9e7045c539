#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Memory of a long batch: runs `toka batch` on a file of real requests and reads its resident memory each second.

    python3 test/batch_memory.py --dir /tmp/memory                     1,000,000 lines, each with its own prompt and one token
    python3 test/batch_memory.py --dir /tmp/memory --lines 20000       a short run

Prints a report in markdown (example: test/results/batch-memory.md). The exit status is 1 if a line is missing, appears twice or is
an error, if memory grew by more than 48 bytes per line after the first tenth (the table of custom_ids needs up to 24 bytes per
line; its size doubles when it is 3/4 full), or if it reached 1 GB. Needs only ./toka and the standard library.
"""
import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENV = {k: v for k, v in os.environ.items() if not k.startswith("TOKA_")}


def resident(pid):
    """Resident memory in MB: in total, the anonymous part (not of mapped files), and the peak so far."""
    try:
        text = open(f"/proc/{pid}/status").read()
    except OSError:
        return None
    found = [re.search(rf"{name}:\s+(\d+) kB", text) for name in ("VmRSS", "RssAnon", "VmHWM")]
    return [int(m.group(1)) / 1024 for m in found] if all(found) else None


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--dir", required=True, help="folder for the input and the output")
    p.add_argument("--toka", default=os.path.join(ROOT, "toka"))
    p.add_argument("--lines", type=int, default=1000000)
    o = p.parse_args()
    os.makedirs(o.dir, exist_ok=True)
    source, out = os.path.join(o.dir, "in.jsonl"), os.path.join(o.dir, "out.jsonl")
    with open(source, "w") as f:
        for i in range(o.lines):
            f.write(json.dumps({"custom_id": f"request-{i}", "prompt": f"{i} +", "max_tokens": 1, "temperature": 1.0}) + "\n")
    if os.path.exists(out):
        os.remove(out)
    t0, samples, n_lines = time.time(), [], 0
    run = subprocess.Popen([o.toka, "batch", "-i", source, "-o", out], env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    written = None
    while run.poll() is None:
        time.sleep(1)
        if written is None and os.path.exists(out):
            written = open(out, "rb")
        while written and (chunk := written.read(1 << 20)):
            n_lines += chunk.count(b"\n")
        now = resident(run.pid)
        if now:
            samples.append((n_lines, *now))
    err = run.stderr.read().decode()
    took = time.time() - t0
    seen = bytearray(o.lines)
    for line in open(out):
        v = json.loads(line)
        i = int(v["custom_id"].split("-")[1])
        if seen[i] or v["error"] is not None or v["response"]["body"]["usage"]["completion_tokens"] != 1:
            sys.exit(f"{v['custom_id']}: appears twice, or has no answer")
        seen[i] = 1
    at = [next((s for s in samples if s[0] >= o.lines * share), samples[-1]) for share in (0.1, 0.25, 0.5, 0.75)] + [samples[-1]]
    growth = (at[-1][2] - at[0][2]) * 1048576 / (at[-1][0] - at[0][0] or 1)
    last = [line for line in err.strip().split("\n") if "ETA" not in line]
    print(f"""# A batch of {o.lines:,} requests

{datetime.date.today()}. `python3 test/batch_memory.py --dir DIR --lines {o.lines}`; embedded model, {took:.0f} s,
{sum(seen):,} lines answered once.

| lines written | resident MB | anonymous MB | peak so far |
|---|---|---|---|""")
    for n, rss, anon, peak in at:
        print(f"| {n:,} | {rss:.1f} | {anon:.1f} | {peak:.1f} |")
    print(f"\nGrowth after the first tenth: {growth:.1f} bytes a line.\n\n    " + "\n    ".join(last))
    sys.exit(sum(seen) != o.lines or growth > 48 or at[-1][3] >= 1024)


if __name__ == "__main__":
    main()
