"""The machine that is measured on: what it is, and whether it was fit to be measured on. Raises nothing."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import psutil

from specllama.base.cpu import this_cpu
from specllama.bench.report import Machine
from specllama.llama import build_info
from specllama.llama.load_plan import physical_cores

BUSY = 0.15  # share of the CPU that others may use before it is said
SWAPPED = 16 << 20  # bytes swapped in or out meanwhile that are no longer chance
SLOWED = 1.10  # the same work at the end against the beginning
_CHUNK = 64 << 20  # bytes a core reads to measure the bandwidth: more than caches hold
_ROUNDS = 5
_LOOK_S = 0.5


def memory_bandwidth(n_threads: int) -> float | None:
    """Bytes a second that `n_threads` cores read from memory together, the best of some rounds; None if short of it."""
    with suppress(MemoryError):
        arrays = [np.ones(_CHUNK // 8) for _ in range(n_threads)]
        with ThreadPoolExecutor(n_threads) as pool:
            best = 0.0
            for _ in range(_ROUNDS):
                started = perf_counter()
                list(pool.map(np.sum, arrays))  # numpy lets go of the interpreter while it adds
                best = max(best, n_threads * _CHUNK / max(perf_counter() - started, 1e-9))
        return best
    return None


def power_source() -> str:
    """mains, battery, or unknown where the machine does not say: most desktops."""
    with suppress(Exception):  # sensors are missing, denied, or odd in as many ways as there are machines
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
    """Bytes of main memory that this process occupies."""
    return int(psutil.Process().memory_info().rss)


def gpu_bytes() -> int | None:
    """Bytes in use on all GPUs together; None where there is none."""
    used = [device.memory_total - device.memory_free for device in build_info().devices if device.is_gpu]
    return sum(used) if used else None


def look() -> Machine:
    """What can be found out before models are loaded; takes about a second."""
    cpu, n_cores = this_cpu(), physical_cores()
    load = others_load()
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


@dataclass(frozen=True, slots=True)
class Watch:
    """What is compared with when the measuring is over."""

    swapped: int

    @classmethod
    def begin(cls) -> Watch:
        """Look at the beginning."""
        return cls(swapped_bytes())

    def warnings(self, machine: Machine, plain_speeds: Sequence[float]) -> tuple[str, ...]:
        """What makes the figures doubtful. `plain_speeds`: of the same plain decoding, in the order it was run."""
        found = []
        if machine.power == "battery" or power_source() == "battery":
            found.append("the machine ran on its battery: most laptops are slower then")
        if machine.load is not None and machine.load > BUSY:
            found.append(f"other programs used {100 * machine.load:.0f} % of the CPU before the first run")
        if (swapped := swapped_bytes() - self.swapped) > SWAPPED:
            found.append(f"the machine swapped {swapped >> 20} MiB meanwhile: it is short of memory")
        third = len(plain_speeds) // 3
        if third >= 1:
            slowed = median(plain_speeds[:third]) / median(plain_speeds[-third:])
            if slowed > SLOWED:
                found.append(
                    f"the machine slowed down by {100 * (slowed - 1):.0f} % meanwhile: heat, or other programs"
                )
            elif slowed < 1 / SLOWED:
                found.append(f"the machine sped up by {100 * (1 / slowed - 1):.0f} % meanwhile: it was busy before")
        return tuple(found)
