"""What the benchmarks share: timing in alternation, memory, and writing results down."""

import csv
import ctypes
import datetime
import functools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

import ssa_hf

Run = Callable[[], object]
Row = dict[str, object]


def measure(runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    """Time the candidates in turn for about ``seconds``, at least 5 rounds; returns seconds per run.

    A candidate that takes more than 20 times the quickest one's time sits out most rounds.
    """
    first = {name: timed(run) for name, run in runs.items()}
    quickest = min(first.values())
    every = {name: 4 if first[name] > 20 * quickest else 1 for name in runs}
    rounds = min(200, max(5, int(seconds / sum(first[name] / every[name] for name in runs))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        for name, run in runs.items():
            if index % every[name] == 0:
                times[name].append(timed(run))
    return times


def timed(run: Run) -> float:
    """Run once and return the seconds it took: on the GPU by events, where there is one."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def peak_memory(run: Run) -> float | None:
    """MiB that a run adds at its peak to the GPU's memory or, without one, to the process; None where not known."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    if sys.platform != "linux":
        return None
    ctypes.CDLL(None).malloc_trim(0)  # give back what earlier runs have freed
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before = _status("VmRSS")
    run()
    return max(0.0, (_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def row(case: str, name: str, times: dict[str, list[float]], softmax: str, peak: float | None) -> Row:
    """Return the CSV row of one candidate: percentiles of its times, and its median over softmax's."""
    values = times[name]
    percentiles = statistics.quantiles(values, n=10)
    median = statistics.median(values)
    return {
        **machine(),
        "case": case,
        "candidate": name,
        "runs": len(values),
        "median_ms": f"{median * 1e3:.3f}",
        "p10_ms": f"{percentiles[0] * 1e3:.3f}",
        "p90_ms": f"{percentiles[-1] * 1e3:.3f}",
        "ratio_to_softmax": f"{median / statistics.median(times[softmax]):.3f}",
        "peak_mib": "" if peak is None else f"{peak:.1f}",
    }


@functools.cache
def machine() -> Row:
    """Return what identifies a measurement: time, device, threads, versions, commit."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        models = (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
        device = f"{next(models, platform.processor())}, {torch.backends.cpu.get_cpu_capability()}"
    git = subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ssa_hf": ssa_hf.__version__,
        "commit": git.stdout.strip(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def print_table(console: Console, rows: Sequence[Row]) -> None:
    """Print the rows of one case."""
    table = Table(title=str(rows[0]["case"]), title_justify="left")
    for column in ("candidate", "median ms", "p10", "p90", "ratio to softmax", "peak MiB"):
        table.add_column(column, justify="left" if column == "candidate" else "right")
    for result in rows:
        keys = ("candidate", "median_ms", "p10_ms", "p90_ms", "ratio_to_softmax", "peak_mib")
        table.add_row(*(str(result[key]) for key in keys))
    console.print(table)


def append_csv(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a CSV, with a header if it is new.

    Raises:
        ValueError: if the file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    if not new and next(csv.reader(_lines(str(path))[:1])) != list(rows[0]):
        raise ValueError(f"{path} has other columns than these results: move it away, or choose another --output.")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)
