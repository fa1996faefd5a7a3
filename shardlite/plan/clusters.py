"""Cards and clusters by name, and a cost model of links. Does not import PyTorch.

`hardware.json` has the figures with their sources, and marks each achieved rate as measured or assumed. All times
computed from the figures are predictions.

The cost model is that of Hockney (1994, Parallel Computing 20) with a term for additions. As in LogP (Culler et al.,
1993), the work per message is separate from the latency, so a link has four costs. With one message per segment,
and if additions do not overlap with messages, collectives take (Thakur, Rabenseifner, Gropp, 2005, IJHPCA 19)

                      ring                                            direct
    all-gather        (W-1) (alpha + overhead) + (W-1)/W M beta       alpha + (W-1) overhead + (W-1)/W M beta
    reduce-scatter    the same, and (W-1)/W M gamma                   the same, and (W-1)/W M gamma

If additions overlap with messages, a `direct` reduce-scatter takes `alpha` plus the longer of two times: that of one
message and all additions, or that of all messages and one addition. The model ignores caches, ranks that share a
processor, and links that share a wire.

Legend: `W` ranks, `M` bytes in the whole buffer.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

Operation = Literal["all-gather", "reduce-scatter"]

_MICROSECOND = 1e-6

HARDWARE = json.loads(Path(__file__).with_name("hardware.json").read_text())
"""Cards, wires, links and clusters, with the source of each figure."""


class LinkCost(NamedTuple):
    """Costs of messages between two ranks, in seconds. All pairs of ranks have the same costs."""

    alpha: float
    """Latency of a step, from when a message can be sent until it can be received, without work on either rank."""

    beta: float
    """Cost per transferred byte. A rank sends one message at a time, and receives one at a time."""

    gamma: float
    """Cost per byte of a message that is added to another message."""

    overhead: float = 0.0
    """Cost per message: work during which its source cannot send, and its target cannot receive, another message."""

    overlaps: bool = True
    """Whether a rank can add while it receives. If not, one processor does both in turn."""


LINKS = {name: LinkCost(**costs) for name, costs in HARDWARE["links"].items()}
"""Links between CPU ranks, by the name of the transport.

`bench/ring/fit.py` has fitted the costs to processor times, on which other programs have little effect. The times are
those of 4 ranks on 2 cores of an AMD EPYC: rows `"ring-fit"` of `cpu_ms_p50` in `bench/results/ring-cpu.jsonl`. Over
gloo, one step of several messages was no faster than several steps. So all latency of `p2p` is in `overhead`, and the
model gives `ring` and `direct` the same time.
"""


def collective_seconds(operation: Operation, algorithm: str, nbytes: int, world_size: int, link: LinkCost) -> float:
    """Return the seconds of a `"ring"` or `"direct"` collective on a buffer of `nbytes`, one message per segment."""
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
class Card:
    """An accelerator, or one rank's share of a CPU."""

    name: str
    nbytes: int
    """Bytes of memory."""

    wide: float
    """Peak rate of fp32 matrix products without TF32, in floating-point operations per second."""

    narrow: float
    """Peak rate of dense bf16 matrix products, in floating-point operations per second."""

    bandwidth: float
    """Memory bandwidth in bytes per second."""

    efficiency: float
    """Measured rate of a training step as a fraction of `narrow`. The same fraction of `wide` is assumed."""

    source: str
    host: float = 0.0
    """Bytes per second from pinned host memory to the card, and as many back at the same time. 0 for a CPU."""

    def flops(self, *, narrow: bool) -> float:
        """Return the expected operations per second of a training step."""
        return self.efficiency * (self.narrow if narrow else self.wide)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes with equal cards."""

    name: str
    card: Card
    node: int
    """Cards per node."""

    inside: LinkCost
    """Link between cards of a node, per card and direction."""

    nic: LinkCost
    """Link between nodes, per network card and direction."""

    nics: int
    """Network cards per node."""

    source: str
    base: float = HARDWARE["base"] * _MICROSECOND
    """Minimum duration of a collective, in seconds."""

    on_gpu: bool = True

    def ring(self, world_size: int) -> LinkCost:
        """Return the link of a ring of `world_size` ranks.

        Across nodes there is one ring per network card, and each ring leaves a node over a different network
        card. So the bandwidth is the lower of two: that of all network cards of a node together, and that of the links
        inside the node.
        """
        if world_size <= self.node:
            return self.inside
        alpha = (self.inside.alpha * (self.node - 1) + self.nic.alpha) / self.node
        return self.inside._replace(alpha=alpha, beta=max(self.inside.beta, self.nic.beta / self.nics))

    def exchange(self, world_size: int) -> LinkCost:
        """Return the link of an exchange among all ranks, which share the network cards of their nodes equally."""
        if world_size <= self.node:
            return self.inside
        leaving = (world_size - self.node) / (world_size - 1)  # fraction of a rank's bytes that leave the node
        beta = max(self.inside.beta, leaving * self.nic.beta * self.node / self.nics)
        return self.inside._replace(alpha=self.nic.alpha, beta=beta)

    def seconds(self, operation: Operation, nbytes: int, world_size: int, *, hierarchical: bool = False) -> float:
        """Return the time of a gather or reduction of a buffer of `nbytes`, as the library runs it.

        Over NCCL, a gather is a ring. A reduction is one exchange among all ranks, and a kernel adds the
        received rows. A `hierarchical` reduction is two exchanges: one inside each node and one across nodes. On a CPU,
        gathers and reductions follow the schedule `direct` over shared memory.
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
        """Return the time to reduce `nbytes` inside each node, and then to reduce each rank's part across the nodes."""
        across = self.nic._replace(beta=self.nic.beta * self.node / self.nics)
        first = collective_seconds("reduce-scatter", "direct", nbytes, self.node, self.inside)
        second = collective_seconds("reduce-scatter", "direct", nbytes // self.node, nodes, across)
        return 2 * self.base + first + second


def _link(card: Card, wire: str, rate: float = 0.0) -> LinkCost:
    """Return the costs of the link or the wire with the name `wire`. A wire transfers `rate` bytes per second.

    For a wire, an addition reads two numbers from the card's memory and writes one number.
    """
    if wire in LINKS:
        return LINKS[wire]
    figures = HARDWARE["wires"][wire]
    return LinkCost(alpha=figures["step"] * _MICROSECOND, beta=1 / (rate * figures["share"]), gamma=3 / card.bandwidth)


def _cluster(name: str, *, card: str, inside: tuple[str, float], nic: tuple[str, float], **others: Any) -> Cluster:
    """Return a cluster from its figures in `hardware.json`."""
    each = CARDS[card]
    return Cluster(name=name, card=each, inside=_link(each, *inside), nic=_link(each, *nic), **others)


CARDS = {name: Card(name=name, **figures) for name, figures in HARDWARE["cards"].items()}
CLUSTERS = {name: _cluster(name, **figures) for name, figures in HARDWARE["clusters"].items()}


def memory_of(card: str, name: str = "--card") -> int:
    """Return the bytes of memory of a card (`H100`), or the bytes of an amount (`80GB`, `24GiB`).

    `name` is that of the option, for errors.

    Raises:
        ValueError: `card` is neither a known name nor an amount above 0.
    """
    nbytes = CARDS[card].nbytes if card in CARDS else nbytes_of(card)
    if not nbytes:
        raise ValueError(f"{name} {card!r} is neither an amount (80GB, 24GiB) nor one of {', '.join(CARDS)}")
    return nbytes


def nbytes_of(amount: str) -> int | None:
    """Return the bytes of an amount (`80GB`, `24GiB`), or `None` if `amount` is not one."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i)?)?B", amount)
    if found is None:
        return None
    return round(float(found[1]) * (1024.0 if found[3] else 1000.0) ** " KMGT".index(found[2] or " "))
