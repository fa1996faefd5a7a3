"""Clusters by name, and a cost model of their links.

The source of each figure stands beside it. Rates that programs reach are marked as measured or assumed. All times
that follow from them are predictions.

The model is that of Hockney (1994, Parallel Computing 20) with a term for additions. As in LogP (Culler et al., 1993),
the work per message is separate from its latency: four numbers per link. The times of `W` ranks with one message per
segment are (`M` bytes, Thakur, Rabenseifner, Gropp, 2005, IJHPCA 19)

                      ring                                            direct
    all-gather        (W-1) (alpha + overhead) + (W-1)/W M beta       alpha + (W-1) overhead + (W-1)/W M beta
    reduce-scatter    the same, and (W-1)/W M gamma                   the same, and (W-1)/W M gamma

if additions do not overlap with messages. If they do, `direct` takes the slower of both. The model ignores ranks that
share a processor, links that share a wire, and caches.

Legend: `W` ranks, `M` bytes in the whole buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardlite.apps.plan.cards import CARDS, DATASHEETS, Card
from shardlite.errors import LayoutError

Operation = Literal["all-gather", "reduce-scatter"]

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


class LinkCost(NamedTuple):
    """Costs of messages between two ranks, in seconds. All pairs of ranks are linked alike."""

    alpha: float
    """Latency of a step: from when a message could be sent until it can be received, without work on either side."""

    beta: float
    """Per byte transferred. A rank sends one message at a time, and receives one at a time."""

    gamma: float
    """Per byte of a message that is added to another."""

    overhead: float = 0.0
    """Per message: work during which its sender cannot send and its target cannot receive another one."""

    overlaps: bool = True
    """Whether a rank adds while it receives. If not, one processor does both."""


LINKS: Mapping[str, LinkCost] = {
    "shared_memory": LinkCost(alpha=15e-6, beta=0.13e-9, gamma=0.02e-9, overhead=155e-6, overlaps=False),
    "p2p": LinkCost(alpha=0.0, beta=0.48e-9, gamma=0.20e-9, overhead=280e-6, overlaps=False),
}
"""Links between CPU ranks, by the name of the transport.

Fitted by `bench/ring/fit.py` to the processor time of 4 ranks on 2 cores of an AMD EPYC, which other programs hardly
change: rows `"ring-fit"` of `cpu_ms_p50` in `bench/results/ring-cpu.jsonl`. Over gloo a step of several messages was no
faster than as many steps, so all latency is in `overhead`, and `ring` and `direct` take the same time by the model.
"""


def collective_seconds(operation: Operation, algorithm: str, nbytes: int, world_size: int, link: LinkCost) -> float:
    """Return the seconds of a `ring` or `direct` collective on `nbytes` in all, with one message per segment.

    Raises:
        LayoutError: `algorithm` has no formula.
    """
    if algorithm not in ("ring", "direct"):
        raise LayoutError(f"{algorithm!r} has no formula; expected 'ring' or 'direct'")
    messages, piece = world_size - 1, -(-nbytes // world_size)
    if messages == 0:
        return 0.0
    moved, added = link.overhead + piece * link.beta, piece * link.gamma * (operation == "reduce-scatter")
    if algorithm == "ring":
        return messages * (link.alpha + moved + added)
    if link.overlaps:
        return link.alpha + max(moved + messages * added, messages * moved + added)
    return link.alpha + messages * (moved + added)


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

    def seconds(self, operation: Operation, nbytes: int, world_size: int, *, hierarchical: bool = False) -> float:
        """Return the time of a gather or reduction of `nbytes` in all, as the library makes them.

        Over NCCL a gather is a ring, and a reduction one exchange among all ranks, whose rows a kernel adds; if it is
        `hierarchical`, one inside each node and one across. On a CPU both are the schedule `direct` of
        shared memory.
        """
        if world_size == 1:
            return 0.0
        if not self.on_gpu:
            return collective_seconds(operation, "direct", nbytes, world_size, self.inside)
        if operation == "all-gather":
            return self.base + collective_seconds(operation, "ring", nbytes, world_size, self.ring(world_size))
        if hierarchical and world_size > self.node > 1 and world_size % self.node == 0:
            return self._in_two_levels(nbytes, world_size // self.node)
        return self.base + collective_seconds(operation, "direct", nbytes, world_size, self.exchange(world_size))

    def _in_two_levels(self, nbytes: int, nodes: int) -> float:
        """Return the time of a reduction of `nbytes` inside each of `nodes`, then of the own part across them."""
        across = self.nic._replace(beta=self.nic.beta * self.node / self.nics)
        first = collective_seconds("reduce-scatter", "direct", nbytes, self.node, self.inside)
        second = collective_seconds("reduce-scatter", "direct", nbytes // self.node, nodes, across)
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
            inside=LINKS["shared_memory"],
            nic=LINKS["shared_memory"],
            nics=1,
            base=0.0,
            source="shared memory of one host, fitted by bench/ring/fit.py",
            on_gpu=False,
        ),
    )
}
