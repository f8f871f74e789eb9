"""The chips that a run is planned for: those of this machine, or those that are named."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import UserError, nearest

# Memory in GB as the makers sell it (GiB, less what the driver keeps), dense bfloat16 products in TFLOP/s by the makers' data sheets, and GB/s that one GPU
# gets out of an all-reduce among several: about 200 where NVLink joins them, about 10 over PCIe.
KNOWN = {
    "B200": (180, 2250, 200.0), "H200": (141, 989, 200.0), "H100": (80, 989, 200.0), "A100-80GB": (80, 312, 200.0), "A100-40GB": (40, 312, 200.0),
    "L40S": (48, 362, 10.0), "RTX PRO 6000": (96, 503, 10.0), "RTX 6000 Ada": (48, 364, 10.0), "A6000": (48, 155, 10.0), "RTX 4090": (24, 165, 10.0),
    "RTX 3090": (24, 71, 10.0),
}  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """count 0: no GPU, and `bytes` is the memory of the machine. flops: bfloat16 a second of one GPU; None if unknown. link: bytes a second, as KNOWN."""

    name: str
    count: int
    bytes: int
    flops: float | None = None
    link: float | None = None

    @property
    def text(self) -> str:
        if not self.count:
            return f"{self.name}, {self.bytes / 1e9:,.1f} GB of memory available"
        return f"{self.count} x {self.name}, {self.bytes / 1e9:,.0f} GB each"


def named(words: str) -> Hardware:
    """`8xH100`, or `8xH100-PCIe` for those that no NVLink joins. Raises UserError for what is not known."""
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+?)(-PCIe)?", words.strip(), re.IGNORECASE)
    assert found is not None
    name = next((known for known in KNOWN if known.lower() == found[2].lower()), None)
    count = int(found[1] or 1)
    if name is None or not count:
        near = nearest(found[2], KNOWN)
        raise UserError(f"--gpus {words}: write it as 8xH100 or 8xH100-PCIe{f'; did you mean {near}?' if near else '.'} Known are {', '.join(KNOWN)}.")
    gigabytes, tflops, link = KNOWN[name]
    return Hardware(f"{name}-PCIe" if found[3] else name, count, gigabytes * 10**9, tflops * 1e12, 10e9 if found[3] else link * 1e9)


def here() -> Hardware:
    rows = smi("--query-gpu=name,memory.total")
    if not rows:
        return Hardware(f"CPU, {len(os.sched_getaffinity(0))} cores", 0, available_memory())
    name, total = rows[0][0], min(int(row[1]) for row in rows) << 20
    _, flops, link = next((facts for known, facts in KNOWN.items() if known.split("-")[0] in name), (0, 0, 0.0))
    return Hardware(name, len(rows), total, flops * 1e12 or None, 10e9 if "PCIe" in name else link * 1e9 or None)


def available_memory() -> int:
    """Bytes that the system could give to programs now; 0 where it does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def smi(query: str) -> list[list[str]] | None:
    """Rows of nvidia-smi's answer; None if there is no such program, or it fails."""
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
