"""Bodies of ranks with symmetric memory, on any device."""

import torch
import torch.distributed as dist
from torch import nn

from shardlite import AdamW, ShardLite
from shardlite.comm.chunking import cut_up
from shardlite.comm.operation import UNNAMED, Operation
from shardlite.config import Route
from tests.support.transports.calls import all_gather, reduce_scatter
from tests.support.transports.ring_cases import Case, assert_equal_bits, ring_sum, tensor_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]


def cases_of(size):
    n = 10_007
    return [
        Case(numel, dtype, 1 << 20, cuts)
        for numel, cuts in ((0, None), (5, None), (n, None), (20 * n, None), (n, [0, *[n // 3] * (size - 1), n]))
        for dtype in (torch.float32, torch.bfloat16)
    ]


def every_dtype(transport, device):
    """From the last rank, and from each."""
    for i, dtype in enumerate(DTYPES):
        full = tensor_of(transport.rank, 1001, dtype).to(device)
        transport.copy_from(transport.world_size - 1, full)
        assert_equal_bits(
            full.cpu().view(torch.uint8), tensor_of(transport.world_size - 1, 1001, dtype).view(torch.uint8)
        )
        expected = tensor_of(i, 1001, dtype)
        cut = cut_up(1001, dtype, transport, None, None)
        start, stop = cut.bounds[transport.rank]
        gathered = torch.zeros_like(expected, device=device)
        gathered[start:stop] = expected[start:stop].to(device)
        transport.all_gather(gathered, cut, UNNAMED)
        assert_equal_bits(gathered.cpu().view(torch.uint8), expected.view(torch.uint8))


def rings(transport, device):
    """Gathers and reductions, against the written-out order of the ring."""
    size, rank = transport.world_size, transport.rank
    for i, case in enumerate(cases_of(size)):
        start, stop = case.bounds(size)[rank]
        full = tensor_of(99, case.numel, case.dtype)
        gathered = torch.zeros_like(full, device=device)
        gathered[start:stop] = full[start:stop].to(device)
        all_gather(gathered, transport, cuts=case.cuts, operation=Operation("gather", i))
        assert_equal_bits(gathered.cpu(), full)
        summand = tensor_of(rank, case.numel, case.dtype).to(device)
        shard = reduce_scatter(summand, transport, divisor=size, cuts=case.cuts, operation=Operation("reduce", i))
        assert_equal_bits(shard.cpu(), ring_sum(size, case, size)[start:stop])


def trained(group, device, transport, make=AdamW, **options):
    """Return the weights on the CPU after three steps of an optimizer `make(parameters, **options)` at stage 3."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(30, 41), nn.Tanh(), nn.Linear(41, 30)) for _ in range(3)]
    model = ShardLite(nn.Sequential(*blocks).to(device), group=group, route=Route(transport=transport))
    optimizer = make(model.parameters(), lr=0.01, **options)
    for step in range(3):
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + dist.get_rank(group))).to(device)
        model(x).square().mean().backward()
        if not options.get("in_backward"):
            model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.cpu() for name, weight in model.full_state_dict().items()}
