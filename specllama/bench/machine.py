"""The machine of a benchmark: its hardware, and conditions that make the figures doubtful. Raises nothing."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import median
from time import perf_counter

import numpy as np
import psutil

from specllama.base.cpu import this_cpu
from specllama.bench.report import Machine
from specllama.llama import build_info
from specllama.llama.load_plan import physical_cores

BUSY = 0.15  # CPU share of other programs above which a warning is given
SWAPPED = 16 << 20  # bytes swapped during the benchmark above which a warning is given
SLOWED = 1.10  # the same for the speed at the beginning over the speed at the end
_CHUNK = 64 << 20  # bytes a core reads to measure the bandwidth: more than the caches hold
_ROUNDS = 5
_LOOK_S = 0.5


def memory_bandwidth(n_threads: int) -> float | None:
    """Bytes per second that `n_threads` cores read together, best of several rounds; None if memory is short."""
    with suppress(MemoryError):
        arrays = [np.ones(_CHUNK // 8) for _ in range(n_threads)]
        with ThreadPoolExecutor(n_threads) as pool:
            best = 0.0
            for _ in range(_ROUNDS):
                started = perf_counter()
                list(pool.map(np.sum, arrays))  # numpy releases the interpreter lock
                best = max(best, n_threads * _CHUNK / max(perf_counter() - started, 1e-9))
        return best
    return None


def power_source() -> str:
    """mains, battery, or unknown (most desktops)."""
    with suppress(Exception):  # sensors are missing, denied or broken in many ways
        battery = psutil.sensors_battery()
        if battery is not None and battery.power_plugged is not None:
            return "mains" if battery.power_plugged else "battery"
    return "unknown"


def others_load() -> float | None:
    """Share of the CPU in use while this process waits."""
    with suppress(Exception):
        return float(psutil.cpu_percent(interval=_LOOK_S)) / 100
    return None


def swapped_bytes() -> int:
    """Bytes swapped in and out since the machine started."""
    with suppress(Exception):
        swap = psutil.swap_memory()
        return int(swap.sin + swap.sout)
    return 0


def rss() -> int:
    """Main memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def gpu_bytes() -> int | None:
    """Bytes in use on all GPUs together; None without a GPU."""
    used = [device.memory_total - device.memory_free for device in build_info().devices if device.is_gpu]
    return sum(used) if used else None


def look() -> Machine:
    """The machine before models are loaded; takes about a second."""
    cpu, n_cores = this_cpu(), physical_cores()
    load = others_load()  # before the bandwidth is measured, which keeps all cores busy
    return Machine(
        cpu=cpu.model,
        features=tuple(sorted(cpu.features)),
        n_cores=n_cores,
        n_threads=psutil.cpu_count() or n_cores,
        memory=int(psutil.virtual_memory().total),
        memory_bytes_s=memory_bandwidth(n_cores),
        gpus=tuple(f"{device.name} ({device.description})" for device in build_info().devices if device.is_gpu),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        power=power_source(),
        load=load,
    )


def doubts(machine: Machine, swapped_before: int, plain_speeds: Sequence[float]) -> tuple[str, ...]:
    """Reasons to doubt the figures. `plain_speeds`: speeds of plain decoding, in the order of the runs."""
    found = []
    if machine.power == "battery" or power_source() == "battery":
        found.append("the machine ran on battery: most laptops are slower then")
    if machine.load is not None and machine.load > BUSY:
        found.append(f"other programs used {100 * machine.load:.0f} % of the CPU before the first run")
    if (swapped := swapped_bytes() - swapped_before) > SWAPPED:
        found.append(f"the machine swapped {swapped >> 20} MiB during the benchmark: it is short of memory")
    third = len(plain_speeds) // 3
    if third >= 1:
        slowed = median(plain_speeds[:third]) / median(plain_speeds[-third:])
        if slowed > SLOWED:
            found.append(f"the machine slowed down by {100 * (slowed - 1):.0f} %: heat or other programs")
        elif slowed < 1 / SLOWED:
            found.append(f"the machine sped up by {100 * (1 / slowed - 1):.0f} %: it was busy at the start")
    return tuple(found)
