"""Bytes that each GPU sends in a step inside its node and across nodes, for each arrangement of ranks.

    python -m shardlite.lab.links

prints the table of `docs/rings.md`. A step gathers all weights twice and reduces all gradients once. Over NCCL,
gathers are rings over all network cards of a node, and so are reductions with `reduce="fast"`. In such a ring, one of
`L` hops leaves the node.

Legend: `W = N L` ranks in `N` nodes of `L` GPUs, each GPU with a network card; `n` bytes in all gradients or all
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from shardlite.lab.plan.presets import PRESETS
from shardlite.lab.train.settings import GPTConfig

NODE = 8
"""GPUs of a node."""

MODEL = "llama-3-8b"

FP32, COMPACT = Fraction(12), Fraction(41, 8)
"""Bytes per parameter of weights and moments: in fp32, and with `master="split24"` and `state="int8"`."""

BF16, QUANTIZED, SUMMED = Fraction(2), Fraction(33, 32), Fraction(4)
"""Bytes per parameter of gathers in bf16, of gathers in 8-bit codes, and of gradients summed in fp32."""


class Sent(NamedTuple):
    """Fractions of a buffer that a GPU sends inside its node and across nodes."""

    inside: Fraction
    across: Fraction


def nothing(nodes: int, node: int) -> Sent:
    """Return the fractions for one GPU, which sends nothing."""
    del nodes, node
    return Sent(Fraction(0), Fraction(0))


def ring(nodes: int, node: int) -> Sent:
    """Return the fractions for a ring: `(W-1)/W` in total. With several nodes, `1/L` of this leaves the node."""
    sent = Fraction(nodes * node - 1, nodes * node)
    across = sent / node if nodes > 1 else Fraction(0)
    return Sent(sent - across, across)


def exchange(nodes: int, node: int) -> Sent:
    """Return the fractions for an all-to-all exchange: `1/W` to each other rank."""
    ranks = nodes * node
    return Sent(Fraction(node - 1, ranks), Fraction(ranks - node, ranks))


def two_levels(nodes: int, node: int) -> Sent:
    """Return the fractions for two exchanges: `(L-1)/L` inside, then `(N-1)/N` of `1/L` across."""
    return Sent(Fraction(node - 1, node), Fraction(nodes - 1, nodes * node))


def inside_only(nodes: int, node: int) -> Sent:
    """Return the fractions for gathers of weights that each node holds completely: `(L-1)/L` inside."""
    del nodes
    return Sent(Fraction(node - 1, node), Fraction(0))


def over_replicas(nodes: int, node: int) -> Sent:
    """Return the fractions for replicas: `(L-1)/L` inside; twice `(N-1)/N` of `1/L` across, for an all-reduce."""
    return Sent(Fraction(node - 1, node), 2 * Fraction(nodes - 1, nodes * node))


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """An arrangement of ranks, and the bytes that they send and hold."""

    take: str
    """Arguments of `ShardLite` and `AdamW`, in Markdown."""

    why: str
    gather: Callable[[int, int], Sent]
    reduce: Callable[[int, int], Sent]
    state: Fraction = FP32
    weights: Fraction = BF16
    replicas: bool = False
    """Whether each node holds all weights."""

    def held(self, numel: int, ranks: int) -> Fraction:
        """Return the bytes of weights and moments on each GPU."""
        return self.state * numel / (min(ranks, NODE) if self.replicas else ranks)

    def sent(self, numel: int, ranks: int) -> Sent:
        """Return the bytes that each GPU sends in a step: inside its node, and across."""
        node = min(ranks, NODE)
        shape = ranks // node, node
        gathers, sums = self.gather(*shape), self.reduce(*shape)
        parts = (2 * self.weights * g + SUMMED * r for g, r in zip(gathers, sums, strict=True))
        return Sent(*(part * numel for part in parts))


ALONE = Arrangement(
    take='`Precision(master="split24")`, `AdamW(state="int8", in_backward=True)`',
    why="no gradient is kept, and the state fits",
    gather=nothing,
    reduce=nothing,
    state=COMPACT,
)
ONE_NODE = Arrangement(take="the default", why="all other transports give the same bits", gather=ring, reduce=exchange)
FLAT = replace(ONE_NODE, why="bits do not depend on the number of nodes")
LEVELS = Arrangement(
    take='`Route(algorithm="hierarchical")`', why="exact, and the least state", gather=ring, reduce=two_levels
)
QUANTIZED_LEVELS = Arrangement(
    take='`Route(algorithm="hierarchical")`, `Precision(quantized_gather=True)`',
    why="as above, and gathers send 8-bit codes, about half the bytes",
    gather=ring,
    reduce=two_levels,
    weights=QUANTIZED,
)
HYBRID = Arrangement(
    take="`group=` a mesh of (nodes, 8)",
    why="gathers stay inside nodes, if an eighth of the state fits on a GPU",
    gather=inside_only,
    reduce=over_replicas,
    replicas=True,
)
FAST = Arrangement(
    take='`Route(reduce="fast")`',
    why="NCCL adds during the transfer, in an unspecified order",
    gather=ring,
    reduce=ring,
)

ROWS: Sequence[tuple[int, Sequence[Arrangement]]] = (
    (1, (ALONE,)),
    (8, (ONE_NODE,)),
    *((ranks, (LEVELS, QUANTIZED_LEVELS, HYBRID, FAST, FLAT)) for ranks in (64, 512)),
)
"""For each number of GPUs, the recommended arrangement, followed by alternatives."""


def numel_of(shape: GPTConfig) -> tuple[int, int]:
    """Return the number of parameters of one block, and of the whole model, for a preset of kind `llama`."""
    width, hidden = shape.width, shape.inner
    kv = (shape.kv_heads or shape.heads) * width // shape.heads
    block = 2 * width * width + 2 * width * kv + 3 * width * hidden + 2 * width
    return block, shape.layers * block + 2 * shape.vocabulary * width + width


def table() -> str:
    """Return the table, preceded by a line that describes the model."""
    block, numel = numel_of(PRESETS[MODEL])
    lines = [
        f"{MODEL}: {numel:,} parameters, {block:,} of them in a block; nodes of {NODE} GPUs; "
        "`Precision(compute=torch.bfloat16)`, sums in fp32. *state* is held by each GPU; the other bytes are sent by "
        "each GPU in a step. GB are 10^9 bytes.",
        "",
        "| GPUs | choice | reason | state, GB | NVLink, GB | network card, GB | network card, for the gradients of a "
        "block, MB |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for ranks, arrangements in ROWS:
        for i, each in enumerate(arrangements):
            sent, node = each.sent(numel, ranks), min(ranks, NODE)
            across = each.reduce(ranks // node, node).across * SUMMED * block
            cells = [f"**{each.take}**" if i == 0 else each.take, each.why, *map(_gb, (each.held(numel, ranks), *sent))]
            lines.append(f"| {ranks} | {' | '.join(cells)} | {float(across) / 1e6:.0f} |")
    return "\n".join(lines)


def _gb(nbytes: Fraction) -> str:
    return f"{float(nbytes) / 1e9:.1f}"


if __name__ == "__main__":
    print(table())
