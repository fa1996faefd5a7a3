"""Clusters by name, with the source of each figure. Rates that programs reach are measured by the source, or marked as
assumed. All times that follow from them are predictions.

Legend: `W` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlite.apps.plan.cards import CARDS, DATASHEETS, Card
from shardlite.comm import LinkCost, cost_model

_MICROSECOND = 1e-6

# Latency of a step of a ring with the protocol "Simple", and what a collective costs at least, in the tuning model of
# NCCL 2.19 to 2.21 (github.com/NVIDIA/nccl, src/graph/tuning.cc: hwLat and baseLat).
_NVLINK_STEP, _PCI_STEP, _NETWORK_STEP = 3.4 * _MICROSECOND, 5.7 * _MICROSECOND, 14.0 * _MICROSECOND
_BASE = 8.4 * _MICROSECOND

_NVSWITCH_SHARE = 0.69
"""Fraction of an NVLink's data-sheet rate: 208 of 300 GB/s per direction between A100 (github.com/NVIDIA/nccl-tests,
issue 178). Assumed for H100 and H200, too.
"""

_NDR_SHARE = 0.97
"""Fraction of 400 Gbit/s: "48-49 GB/s per NIC" (NVIDIA in github.com/NVIDIA/nccl-tests, issue 267)."""

_HDR_SHARE = 0.85
"""Fraction of 200 Gbit/s: 84.8 of 100 GB/s over four of them (github.com/NVIDIA/nccl-tests, issue 119)."""

_SHARE = 0.8
"""Fraction of the rate of PCIe and Ethernet. Assumed."""


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
        """Return the link of an exchange among all ranks, which share the network cards equally."""
        if world_size <= self.node:
            return self.inside
        leaving = (world_size - self.node) / (world_size - 1)  # of what a rank sends
        beta = max(self.inside.beta, leaving * self.nic.beta * self.node / self.nics)
        return self.inside._replace(alpha=self.nic.alpha, beta=beta)

    def seconds(
        self, operation: cost_model.Operation, nbytes: int, world_size: int, *, hierarchical: bool = False
    ) -> float:
        """Return the time of a gather or reduction of `nbytes` in total, as the library runs it.

        Over NCCL a gather is a ring, and a reduction one exchange among all ranks, whose rows a kernel adds; if it is
        `hierarchical`, one inside each node and one across. On a CPU both are the schedule that `cost_model` selects
        for shared memory.
        """
        if world_size == 1:
            return 0.0
        if not self.on_gpu:
            algorithm = cost_model.best_algorithm(nbytes, world_size, self.inside)
            return cost_model.seconds(operation, algorithm, nbytes, world_size, self.inside)
        if operation == "all-gather":
            return self.base + cost_model.seconds(operation, "ring", nbytes, world_size, self.ring(world_size))
        if hierarchical and world_size > self.node > 1 and world_size % self.node == 0:
            return self._in_two_levels(nbytes, world_size // self.node)
        return self.base + cost_model.seconds(operation, "direct", nbytes, world_size, self.exchange(world_size))

    def _in_two_levels(self, nbytes: int, nodes: int) -> float:
        """Return the time of a reduction of `nbytes` inside each of `nodes`, then of the own part across them."""
        across = self.nic._replace(beta=self.nic.beta * self.node / self.nics)
        first = cost_model.seconds("reduce-scatter", "direct", nbytes, self.node, self.inside)
        second = cost_model.seconds("reduce-scatter", "direct", nbytes // self.node, nodes, across)
        return 2 * self.base + first + second


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
        source=f"NVSwitch {nvlink} both ways, a {infiniband} InfiniBand card per GPU: {DATASHEETS}, {host}",
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
            source=f"NVLink bridge 600 GB/s both ways between two cards: {DATASHEETS}, A100 PCIe; one 100 Gbit/s "
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
            source=f"PCIe 4.0 x16, 64 GB/s both ways: {DATASHEETS} of the A100 PCIe; one 100 Gbit/s Ethernet card per "
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
