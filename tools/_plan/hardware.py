"""Devices and their links as numbers, and what an operation takes on them.

A device is a file (`tools/_plan/devices/*.json`, or one that `tools/plan.py measure` or `fit`
wrote) of constants with a physical meaning, each with its source. Formulas, with d the smallest
dimension of a product on the rank:

- product: FLOPs / (peak x e x d / (d + d0))
- fused attention: FLOPs of visible pairs / (peak x a x s / (s + s0) x width / (width + w0))
- bound by memory: bytes / (bandwidth x share)
- collective of n ranks, r on each of K nodes: latencies of its hops, and the share (n - 1) / n of
  its bytes (twice for an all-reduce) over the link within a node, or over the network with r
  adapters
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from megatron.tools._plan.work import Core, Exchange, Product, Work

from megatron.config.errors import UserError

T = TypeVar("T")
STARVES = 4  # how sharply the longer of device and host decides
FOLDER = Path(__file__).with_name("devices")


@dataclass(frozen=True)
class Hardware:
    """One device, its node and the network. Rates are of one device and one direction."""

    name: str
    memory_gib: float  # nominal
    peak_tflops: float  # dense, of the compute precision
    peak_fp8_tflops: float
    memory_gbps: float  # GB/s
    link_gbps: float  # GB/s to other devices of its node
    network_gbps: float  # GB/s to other nodes
    host_gbps: float  # GB/s from and to host memory
    host_memory_gbps: float  # GB/s of a node's host memory
    node_size: int
    product_efficiency: float  # e
    product_half: float  # d0
    fp8_efficiency: float
    fp8_half: float
    flash1_efficiency: float  # a, by generation of kernels (FlashAttention 1, 2, and 3 or cuDNN)
    flash2_efficiency: float
    flash3_efficiency: float
    attention_half: float  # s0
    memory_efficiency: float
    hidden_traffic: float  # bytes that norms and residual sums move, of the least they can
    launch_us: float  # the host's time for a kernel
    link_efficiency: float
    switch_gain: float  # of an all-reduce within a node, which the switch adds up
    network_efficiency: float
    congestion: float  # what each doubling of a group's nodes adds to a byte's time
    link_latency_us: float  # of one hop
    network_latency_us: float
    collective_us: float  # of any collective, alongside its hops
    overlap: float  # the part of a collective that runs alongside products
    slowdown: float  # of computation alongside a collective
    jitter: float  # of a step, for each doubling of the nodes
    layer_jitter: float  # likewise where ranks wait for each other in each layer (ZeRO-3)
    step_ms: float  # of a step, alongside all that is counted
    peak_fp32_tflops: float = 0.0  # of products in fp32; 0: peak_tflops
    cores: int = 0  # of a node of CPUs, which its ranks share; 0: each rank has a device
    # by kind of layout the 10th and 90th percentile of measured over predicted seconds
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The torch device type whose kernels a run uses."""
        return "cpu" if self.cores else "cuda"

    def product_seconds(self, product: Product) -> float:
        """Of matrix products."""
        if product.flops == 0:
            return 0.0
        least = 3 / (1 / product.m + 1 / product.n + 1 / product.k)
        if product.fp8:
            peak, most, half = self.peak_fp8_tflops, self.fp8_efficiency, self.fp8_half
        else:
            peak, most, half = self.peak_tflops, self.product_efficiency, self.product_half
        if product.wide and self.peak_fp32_tflops:
            peak = self.peak_fp32_tflops
        return product.flops / (peak * 1e12 * most * least / (least + half))

    def core_seconds(self, core: Core, generation: int) -> float:
        """Of fused attention."""
        most = (self.flash1_efficiency, self.flash2_efficiency, self.flash3_efficiency)[
            generation - 1
        ]
        share = core.length / (core.length + self.attention_half)
        width = core.head_dim / (core.head_dim + 32) * 1.25  # 1 at 128
        return core.flops / (self.peak_tflops * 1e12 * most * share * width)

    def stream_seconds(self, size: float) -> float:
        """Of a kernel that reads and writes that many bytes."""
        return size / (self.memory_gbps * 1e9 * self.memory_efficiency)

    def exchange_seconds(self, operation: str, size: float, ranks: int, nodes: int) -> float:
        """Of a collective or message of `size` bytes in a group that spans that many nodes."""
        if ranks == 1 or size == 0:
            return 0.0
        here = ranks / nodes
        within = self.link_gbps * 1e9 * self.link_efficiency
        crowd = 1 + self.congestion * math.log2(nodes)
        across = self.network_gbps * 1e9 * self.network_efficiency / crowd
        rate = within if nodes == 1 else min(within, here * across)
        if operation == "message":
            latency = self.link_latency_us if nodes == 1 else self.network_latency_us
            return (self.collective_us + latency) * 1e-6 + size / min(within, rate)
        if operation == "all-to-all" and nodes > 1:
            rate = min(within, across * (ranks - 1) / (ranks - here))
        hops = (here - 1) * self.link_latency_us + (nodes - 1) * self.network_latency_us
        moved = (ranks - 1) / ranks * size
        if operation == "all-reduce":
            moved *= 2
            hops = 2 * (
                math.log2(here) * self.link_latency_us + math.log2(nodes) * self.network_latency_us
            )
            if nodes == 1 and ranks > 4:
                rate *= self.switch_gain
        return (self.collective_us + hops) * 1e-6 + moved / rate


class Seconds(dict[str, float]):
    """Of passes, by what they are spent on: kernels, launches, and exchanges that nothing hides by
    their axis.
    """

    @property
    def total(self) -> float:
        return sum(self.values())

    def add(self, other: Seconds, times: int = 1) -> None:
        """Add `times` times another pass."""
        for name, value in other.items():
            self[name] = self.get(name, 0.0) + times * value


class Pricing:
    """What work takes on a device. `groups`: (ranks, nodes) of each axis; `generation` of
    attention kernels.
    """

    def __init__(
        self,
        hardware: Hardware,
        groups: dict[str, tuple[int, int]],
        generation: int,
        launches: float = 1.0,
    ):
        self.hardware = hardware
        self.launch_seconds = launches * hardware.launch_us * 1e-6
        self.groups = groups
        self.generation = generation
        # ranks of a node for each of its cores; on a CPU, sending takes a core as computing does
        sharing = groups["node"][0] / hardware.cores if hardware.cores else 0.0
        self.factor = max(1.0, sharing)
        self.hides = sharing < 1
        self.pairs = True  # passes in pairs hide exchanges of experts
        self._priced: dict[int, tuple[Work, Seconds]] = {}  # by identity

    def unpaired(self) -> Pricing:
        """Of the same passes, each on its own."""
        found = copy.copy(self)
        found.pairs = False
        return found

    def alone(self) -> Pricing:
        """Of a rank whose core no other rank wants just then."""
        found = copy.copy(self)
        found.factor = 1.0
        found._priced = {}
        return found

    def exchange(self, each: Exchange, times: int = 1) -> float:
        """Of one exchange that nothing hides, in that many parts. Ranks that share a core share
        what sending takes of it; until all have come to a collective, none takes it.
        """
        if each.axis == "host":
            return each.size / (self.hardware.host_gbps * 1e9)
        ranks, nodes = self.groups[each.axis]
        size = each.size / times
        part = self.hardware.exchange_seconds(each.operation, size, ranks, nodes)
        waiting = self.hardware.collective_us * 1e-6 if part else 0.0
        return times * (waiting + self.factor * (part - waiting))

    def seconds(self, work: Work) -> Seconds:
        """Of one pass. Many layers do the same work, which is priced once."""
        if id(work) not in self._priced:
            self._priced[id(work)] = work, self._seconds(work)
        return self._priced[id(work)][1]

    def _seconds(self, work: Work) -> Seconds:
        hardware = self.hardware
        factor = self.factor
        products = factor * sum(map(hardware.product_seconds, work.products))
        attention = factor * sum(
            hardware.core_seconds(each, self.generation) for each in work.cores
        )
        moved = sum(work.streams) + work.hidden * hardware.hidden_traffic
        memory = factor * hardware.stream_seconds(moved)
        left = {"products": products, "cores": attention, "pass": products + attention + memory}
        exposed, hidden = self._exposed(work, left)
        found = Seconds(
            {
                "matrix products": products,
                "attention": attention,
                "memory-bound kernels": memory,
                "slowed by overlap": hardware.slowdown * hidden,
                **exposed,
            }
        )
        launching = factor * work.launches * self.launch_seconds
        if not hardware.cores:  # else one thread launches and computes
            # kernels differ in length: the device starves at some before the host is slower in all
            device = found.total
            launching = (device**STARVES + launching**STARVES) ** (1 / STARVES) - device
        found["host launches"] = launching
        return found

    def _exposed(self, work: Work, left: dict[str, float]) -> tuple[dict[str, float], float]:
        """(seconds of exchanges that nothing hides, by axis; seconds that are hidden). `left`:
        seconds of what may hide them, which is used up.
        """
        exposed: dict[str, float] = {}
        hidden = 0.0
        for each in work.exchanges:
            time = self.exchange(each)
            covered = 0.0
            if each.hidden_by and self.hides:
                share = self.hardware.overlap if each.hidden_by == "products" else 1.0
                covered = min(time * share, left[each.hidden_by])
                left[each.hidden_by] -= covered
                left["pass"] -= covered if each.hidden_by != "pass" else 0.0
            hidden += covered
            exposed[each.axis] = exposed.get(each.axis, 0.0) + time - covered
        return exposed, hidden


@cache
def names() -> tuple[str, ...]:
    """Of the devices that are known."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_hardware(which: str, is_fitted: bool = True) -> Hardware:
    """A known device by its name, or a file; with is_fitted False as it was before its constants
    were fitted to published steps. Raises UserError.
    """
    return _read(which, lambda written: hardware_of(written, is_fitted))


def hardware_sources(which: str) -> dict[str, str]:
    """Where the constants of a device came from, before any fit. Raises UserError."""

    def first(text: str) -> str:
        return re.sub(r"^fitted to [^;]*; before: ", "", text)

    return _read(
        which,
        lambda written: {name: first(c["source"]) for name, c in written["constants"].items()},
    )


def _read(which: str, made_of: Callable[[dict[str, Any]], T]) -> T:
    """What is made of a device's file. Raises UserError."""
    path = FOLDER / f"{which}.json"
    if not path.is_file():
        path = Path(which)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise UserError(
            f"--hardware {which}: neither a file nor one of {', '.join(names())}"
        ) from None
    try:
        return made_of(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--hardware {which}: not a file of a device: {error}") from None


# by what a device calls itself; the first that is found counts
DEVICES = (
    (r"GB200|B200", "b200"),
    (r"H200", "h200"),
    (r"H100|H800", "h100"),
    (r"A100.*80|A800", "a100-80"),
    (r"A100", "a100-40"),
)


def known_hardware(device_name: str) -> Hardware | None:
    """That of a GPU by its name; None where it is not known."""
    for pattern, name in DEVICES:
        if re.search(pattern, device_name):
            return load_hardware(name)
    return None


def hardware_of(written: dict[str, Any], is_fitted: bool = True) -> Hardware:
    """The device that a file describes: `constants`, each with `value` and `source`, and where it
    was fitted what it was `before`.
    """
    kinds = {each.name for each in fields(Hardware)} - {"name", "errors"}
    values = {
        name: each["value"] if is_fitted else each.get("before", each["value"])
        for name, each in written["constants"].items()
    }
    unknown = sorted(set(values) - kinds)
    if unknown:
        raise ValueError(f"unknown constants {', '.join(unknown)}")
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}, not a number from 0")
    errors = {
        kind: (float(low), float(high)) for kind, (low, high) in written.get("errors", {}).items()
    }
    return Hardware(name=written["name"], errors=errors, **values)


OF_MEMORY = ("memory_gib", "memory_gbps")  # in which devices of one type differ


def gpu_type(hardware: Hardware) -> str:
    """Devices of one type differ in their memory alone: its size ends the name."""
    return re.sub(r" \d+ GB$", "", hardware.name)


def write_hardware(
    path: Path, hardware: Hardware, sources: dict[str, str], prior: Hardware | None = None
) -> None:
    """The file of a device; `sources`: where constants come from; others are as they were. What
    `prior` has otherwise is written next to the value.
    """
    constants: dict[str, dict[str, Any]] = {}
    for each in fields(Hardware):
        if each.name in ("name", "errors"):
            continue
        value = getattr(hardware, each.name)
        source = sources.get(each.name, "as before")
        constants[each.name] = {"value": value, "source": source}
        if prior is not None and (before := getattr(prior, each.name)) != value:
            constants[each.name]["before"] = before
    written = {"name": hardware.name, "constants": constants, "errors": hardware.errors}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
