"""Cards and clusters by name. Beside each figure stands its source; rates that a program reaches are marked as measured
by whom, or as assumed. All times that follow from them are predictions.

Legend: `W` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlite.comm import LinkCost, cost_model

_MICROSECOND = 1e-6
_GB = 10**9

_DATASHEETS = "vendor's data sheet"

# Latency of a step of a ring with the protocol "Simple", and what a collective costs at least, in the tuning model of
# NCCL 2.19 to 2.21 (github.com/NVIDIA/nccl, src/graph/tuning.cc: hwLat and baseLat).
_NVLINK_STEP, _PCI_STEP, _NETWORK_STEP = 3.4 * _MICROSECOND, 5.7 * _MICROSECOND, 14.0 * _MICROSECOND
_BASE = 8.4 * _MICROSECOND

_NVSWITCH_SHARE = 0.69
"""Of an NVLink's data-sheet rate: 208 of 300 GB/s per direction between A100 (github.com/NVIDIA/nccl-tests, issue 178).
Assumed for H100 and H200, too.
"""

_NDR_SHARE = 0.97
"""Of 400 Gbit/s: "48-49 GB/s per NIC" (NVIDIA in github.com/NVIDIA/nccl-tests, issue 267)."""

_HDR_SHARE = 0.85
"""Of 200 Gbit/s: 84.8 of 100 GB/s over four of them (github.com/NVIDIA/nccl-tests, issue 119)."""

_SHARE = 0.8
"""Of PCIe and Ethernet: assumed."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One accelerator, or a rank's part of a CPU."""

    name: str
    nbytes: int
    """Memory."""

    wide: float
    """Peak of fp32 matrix products, in floating-point operations per second, without TF32."""

    narrow: float
    """Peak of bf16 matrix products, dense."""

    bandwidth: float
    """Of its memory, bytes per second."""

    efficiency: float
    """Measured operations per second of a training step as a part of `narrow`. Assumed for `wide`, too."""

    source: str

    def flops(self, *, narrow: bool) -> float:
        """Return the operations per second that a training step is expected to reach."""
        return self.efficiency * (self.narrow if narrow else self.wide)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal cards."""

    name: str
    card: Card
    node: int
    """Cards per node."""

    inside: LinkCost
    """Between cards of a node, per card and direction."""

    nic: LinkCost
    """Between nodes, per network card and direction."""

    nics: int
    """Network cards per node."""

    base: float
    """Seconds that a collective takes at least."""

    source: str
    on_gpu: bool = True

    def ring(self, world_size: int) -> LinkCost:
        """Return the link of a ring of `world_size` ranks.

        Across nodes there are as many rings as network cards, each leaving a node over another one, so a ring is as
        fast as all cards of a node together, or as the links inside.
        """
        if world_size <= self.node:
            return self.inside
        alpha = (self.inside.alpha * (self.node - 1) + self.nic.alpha) / self.node
        return self.inside._replace(alpha=alpha, beta=max(self.inside.beta, self.nic.beta / self.nics))

    def exchange(self, world_size: int) -> LinkCost:
        """Return the link of an exchange among all ranks, in which each has its part of the network cards."""
        if world_size <= self.node:
            return self.inside
        leaving = (world_size - self.node) / (world_size - 1)  # of what a rank sends
        beta = max(self.inside.beta, leaving * self.nic.beta * self.node / self.nics)
        return self.inside._replace(alpha=self.nic.alpha, beta=beta)

    def seconds(self, operation: cost_model.Operation, nbytes: int, world_size: int) -> float:
        """Return the time of a gather or reduction of `nbytes` in all, as the library makes them.

        Over NCCL a gather is a ring, and a reduction one exchange among all ranks, whose rows a kernel adds. On a CPU
        both are the schedule that `cost_model` selects for shared memory.
        """
        if world_size == 1:
            return 0.0
        if not self.on_gpu:
            algorithm = cost_model.best_algorithm(nbytes, world_size, self.inside)
            return cost_model.seconds(operation, algorithm, nbytes, world_size, self.inside)
        if operation == "all-gather":
            return self.base + cost_model.seconds(operation, "ring", nbytes, world_size, self.ring(world_size))
        return self.base + cost_model.seconds(operation, "direct", nbytes, world_size, self.exchange(world_size))


CARDS = {
    card.name: card
    for card in (
        Card(
            name="A100-80GB",
            nbytes=80 * _GB,
            wide=19.5e12,
            narrow=312e12,
            bandwidth=2039e9,
            efficiency=0.642,
            source=f"{_DATASHEETS}, nvidia-a100-datasheet-us-nvidia-1758950-r4; efficiency of a 7B model, 2048 tokens, "
            "fully sharded over 8 cards: github.com/mosaicml/llm-foundry, scripts/train/benchmarking (64.23 %)",
        ),
        Card(
            name="A100-40GB",
            nbytes=40 * _GB,
            wide=19.5e12,
            narrow=312e12,
            bandwidth=1555e9,
            efficiency=0.642,
            source=f"{_DATASHEETS}, nvidia-a100-datasheet; efficiency as for 80 GB",
        ),
        Card(
            name="H100",
            nbytes=80 * _GB,
            wide=67e12,
            narrow=989.4e12,
            bandwidth=3350e9,
            efficiency=0.464,
            source=f"{_DATASHEETS} of the H100 SXM (bf16 1,979 teraFLOPS with sparsity, half without); efficiency of "
            "a 7B model, 2048 tokens, fully sharded over 8 cards: github.com/mosaicml/llm-foundry, "
            "scripts/train/benchmarking (46.44 %)",
        ),
        Card(
            name="H200",
            nbytes=141 * _GB,
            wide=67e12,
            narrow=989.4e12,
            bandwidth=4800e9,
            efficiency=0.464,
            source=f"{_DATASHEETS} of the H200 SXM; efficiency of the H100, which has the same cores",
        ),
        Card(
            name="CPU core",
            nbytes=8 * _GB,
            wide=69.4e9,
            narrow=69.4e9,
            bandwidth=10e9,
            efficiency=1.0,
            source="one core of an AMD EPYC: the step without communication in bench/results/step-gpt-2ranks.jsonl "
            "takes 1.010 s for 70.1 billion operations, in fp32; bf16, memory and bandwidth are assumed",
        ),
    )
}


def _nvlink(card: Card, rate: float) -> LinkCost:
    return _link(card, rate * _NVSWITCH_SHARE, _NVLINK_STEP)


def _link(card: Card, rate: float, step: float) -> LinkCost:
    """Return the costs of a link of `rate` bytes per second. An addition reads two numbers and writes one."""
    return LinkCost(alpha=step, beta=1 / rate, gamma=3 / card.bandwidth)


def _dgx(name: str, card: Card, inside: float, nic: float, *sheet: str) -> Cluster:
    """Return hosts of eight GPUs with an InfiniBand card each. `sheet` has both rates and the host in words."""
    nvlink, infiniband, host = sheet
    return Cluster(
        name=name,
        card=card,
        node=8,
        inside=_nvlink(card, inside),
        nic=_link(card, nic, _NETWORK_STEP),
        nics=8,
        base=_BASE,
        source=f"NVSwitch {nvlink} both ways, a {infiniband} InfiniBand card per GPU: {_DATASHEETS}, {host}",
    )


_A100, _H100, _H200, _CPU = (CARDS[name] for name in ("A100-80GB", "H100", "H200", "CPU core"))

CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        _dgx("dgx-h100", _H100, 450e9, 50e9 * _NDR_SHARE, "900 GB/s", "400 Gbit/s", "DGX H100"),
        _dgx("dgx-h200", _H200, 450e9, 50e9 * _NDR_SHARE, "900 GB/s", "400 Gbit/s", "DGX H200"),
        _dgx("dgx-a100", _A100, 300e9, 25e9 * _HDR_SHARE, "600 GB/s", "200 Gbit/s", "DGX A100"),
        Cluster(
            name="nvlink-a100",
            card=_A100,
            node=2,
            inside=_nvlink(_A100, 300e9),
            nic=_link(_A100, 12.5e9 * _SHARE, _NETWORK_STEP),
            nics=1,
            base=_BASE,
            source=f"NVLink bridge 600 GB/s both ways between two cards: {_DATASHEETS}, A100 PCIe; one 100 Gbit/s "
            "Ethernet card per pair is assumed",
        ),
        Cluster(
            name="pcie-a100",
            card=_A100,
            node=8,
            inside=_link(_A100, 32e9 * _SHARE, _PCI_STEP),
            nic=_link(_A100, 12.5e9 * _SHARE, _NETWORK_STEP),
            nics=1,
            base=_BASE,
            source=f"PCIe 4.0 x16, 64 GB/s both ways: {_DATASHEETS} of the A100 PCIe; one 100 Gbit/s Ethernet card per "
            "node is assumed",
        ),
        Cluster(
            name="ethernet-a100",
            card=_A100,
            node=1,
            inside=_link(_A100, 3.125e9 * _SHARE, _NETWORK_STEP),
            nic=_link(_A100, 3.125e9 * _SHARE, _NETWORK_STEP),
            nics=1,
            base=_BASE,
            source="one card per host and 25 Gbit/s Ethernet (IEEE 802.3by)",
        ),
        Cluster(
            name="cpu",
            card=_CPU,
            node=1 << 30,
            inside=cost_model.LINKS["shared_memory"],
            nic=cost_model.LINKS["shared_memory"],
            nics=1,
            base=0.0,
            source="shared memory of one host, fitted by bench/ring/fit.py: `comm.cost_model.LINKS`",
            on_gpu=False,
        ),
    )
}
