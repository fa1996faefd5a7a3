"""Send signals between neighbours in a ring, inside kernels, through memory that both neighbours can access.

A program communicates only with two other programs: those with its own number on the previous and on the next rank.
Messages are written into slots, of which a program has `D`, in the memory of the rank that reads the messages. Each
program has two flags. Each flag is in the memory of the rank that waits for it, and is written by one program only:

    previous rank --- message ---> [slots]   rank                 `arrived`: number of messages that were written
                  <-- room -------                                `freed`:   number that the next rank has read

**A flag** has the value `epoch * 2^32 + count`. The epoch is the number of the launch, and the count is a number of
messages in this launch. So flags only grow and are never reset. A flag of an earlier launch is never mistaken for a
flag of this launch, and a neighbour in another launch is detected. A flag is written with release semantics, after a
barrier that orders the stores of the whole program. A flag is read with acquire semantics. Both accesses are at system
scope. So after a program has read a count, the program also reads the current data of the counted messages.

**No slot is overwritten early.** Message `j` is written to slot `j % D` once `freed` is at least `max(0, j - D + 1)` in
this epoch. For `j >= D` this means that the next rank has read message `j - D`, the previous message in the slot. For
smaller `j` this means that the program of the next rank has begun this epoch, which that program signals with a count
of 0. The launches of a device run one after the other. So the previous launch of the next rank has finished, and has
read all slots. This is true however far a rank is ahead, and even if launches divide the memory of slots differently.

**There is no deadlock** if each rank runs its actions one after the other, and action `k` reads message `k` and sends
message `k + b`, with `b` from 1 to `D - 1`. The first `b` messages are sent before any message is read. In action `k`,
a rank waits for two things. Message `k` arrives when the previous rank has done action `k - b`. A slot for message
`k + b` is free when the next rank has read message `k + b - D`, which is message `k - 1` or an earlier message. So
action `k` waits only for earlier actions of other ranks, and the rank that is furthest behind never waits. (With
`b = D` all ranks could be in action `k`, each waiting for the next rank to read message `k`.) When all sent messages
have been read, `b` may change, because ranks then still wait for earlier actions only.

**Waits are limited.** A program reads a flag at most `limit` times. If the flag is still too small then, the program
stops waiting, storing and signalling, so its neighbours reach their limits too. The program runs to completion, and
writes the reason to the rank's error word. While the error word is set, launches do nothing. The host reads the error
word with `ring_failure`.

Legend: `W` ranks, `P` programs, `D` slots of a program.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import check_flat, constexpr, jit, tl

PROGRAMS = 32
DEPTH = 4
SLOT_NBYTES = 1 << 16  # as large as a block of the interpreter in fp32
LIMIT = 1 << 26
LARGEST_EPOCH = 2**31 - 1
_FLAG_STRIDE = 16  # int64 numbers from flag to flag: 128 bytes, so that no two flags share a cache line
FREED = constexpr(_FLAG_STRIDE)

NOTHING_ARRIVED = constexpr(1)
NOTHING_FREED = constexpr(2)
OTHER_EPOCH = constexpr(3)
_REASONS = {  # by the numbers above
    1: "no message arrived from the previous rank",
    2: "the next rank freed no slot",
    3: "a neighbour is in another epoch",
}


# ---- on the device ------------------------------------------------------------------------------------------------


@jit
def put_signal(flag_ptr: tl.tensor, value: tl.tensor, AMD: tl.constexpr) -> None:
    """Set a flag, usually one on another rank, to `value`, after the stores of all threads of this program."""
    if AMD:  # on AMD a barrier does not wait for stores, and a release waits only for stores of its own wave
        wait: tl.constexpr = "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1"
        tl.inline_asm_elementwise(wait, "=v,v,~{memory}", [tl.program_id(0)], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()  # with a barrier before it, a release also orders the stores of other threads
    tl.atomic_xchg(flag_ptr, value, sem="release", scope="sys")


@jit
def wait_signal(flag_ptr: tl.tensor, value: tl.tensor, patience: tl.tensor) -> tl.tensor:
    """Read a flag until it is at least `value`, but at most `patience` more times. Return the last value."""
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    looks = 0
    while (seen < value) & (looks < patience):
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        looks += 1
    tl.debug_barrier()
    return seen


@jit
def begin_ring(freed_ptr: tl.tensor, zero: tl.tensor, error_ptr: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Signal to the previous rank, by its flag `freed_ptr`, that slots are free. Return the patience of this program.

    `zero` is the flag of this epoch with a count of 0. The patience is the number of times that a program may read a
    flag. A patience of 0 or less means that something has failed, and that nothing may be stored. A patience below 0
    encodes the reason for `report_failure`.
    """
    patience = tl.where(tl.load(error_ptr) == 0, limit, 0)
    if patience > 0:
        put_signal(freed_ptr, zero, False)  # `AMD` is not needed, because nothing was stored
    return patience


@jit
def await_flag(
    flag_ptr: tl.tensor, value: tl.tensor, step: tl.tensor, REASON: tl.constexpr, patience: tl.tensor
) -> tl.tensor:
    """Wait until a flag is at least `value`. Return the patience, or after a failure a negative code for the reason."""
    seen = wait_signal(flag_ptr, value, patience)
    elsewhere = seen - value > 0x7FFFFFFF  # counts are smaller, so the epochs differ
    failed = (patience > 0) & ((seen < value) | elsewhere)
    return tl.where(failed, -256 * step - tl.where(elsewhere, OTHER_EPOCH, REASON), patience)


@jit
def report_failure(zero: tl.tensor, error_ptr: tl.tensor, patience: tl.tensor) -> None:
    """If this program has failed, write the failure to the error word, unless the word already has a failure."""
    if patience < 0:
        tl.atomic_cas(error_ptr, tl.full([], 0, tl.int64), zero - patience, scope="sys")


@jit
def flags_of(flag_table_ptr: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """Return the address of this program's two flags on a rank: `arrived`, followed by `freed`."""
    flags_ptr = tl.load(flag_table_ptr + rank).to(tl.pointer_type(tl.int64))
    return flags_ptr + tl.program_id(0) * (2 * FREED)


@jit
def slots_of(slot_table_ptr: tl.tensor, rank: tl.tensor, numel: tl.tensor, WIRE: tl.constexpr) -> tl.tensor:
    """Return the address of this program's slots on a rank, which have `numel` elements in total."""
    slots_ptr = tl.load(slot_table_ptr + rank).to(tl.pointer_type(WIRE))
    # Declare the alignment, which Triton does not know for an address from a table. Otherwise accesses would be scalar.
    return tl.multiple_of(slots_ptr, 16) + tl.program_id(0).to(tl.int64) * numel


# ---- on the host --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The ranks of a ring, and the memory that they share, as one rank addresses it.

    All integers except `rank` must be equal on all ranks. Launches with the same memory must run one after the other,
    in the same order on all ranks. After a failure, set all flags and error words to zero while no rank is in a launch.
    """

    rank: int
    """The number of this rank."""

    world_size: int
    """Number of ranks `W`, 2 or more."""

    slots: Tensor
    """Addresses of each rank's slots in this rank's address space [W], int64. The slots of a rank have `slots_nbytes`
    bytes in total, and start at a multiple of 16."""

    flags: Tensor
    """Addresses of each rank's flags in this rank's address space [W], int64. The flags of a rank are `flag_numel`
    int64 numbers, initially zero."""

    error: Tensor
    """Error word of this rank [1], int64, initially zero."""

    programs: int = PROGRAMS
    """Maximum `P`. The launch fails if the device cannot run this many programs at the same time, along with its other
    work."""

    depth: int = DEPTH
    """Number of slots per program `D`, 2 or more. `D - 1` messages may be in flight to a rank."""

    slot_nbytes: int = SLOT_NBYTES
    """Bytes of one slot, a power of two, and so the maximum length of a message."""

    limit: int = LIMIT
    """Maximum number of times that a program reads a flag. It must be large enough for the first launch of a kernel,
    during which neighbours wait until the kernel is compiled."""

    def check(self, who: str, device: torch.device) -> None:
        """Check that all fields are consistent, and that tensors are on `device`.

        Raises:
            ValueError: a number is out of range, or a tensor has the wrong shape, dtype or device.
        """
        if self.world_size < 2 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"{who}: a ring needs at least 2 ranks, got rank {self.rank} of {self.world_size}")
        for name, least, most in (("programs", 1, 2**16), ("depth", 2, 2**10), ("limit", 1, 2**31 - 1)):
            if not least <= (number := getattr(self, name)) <= most:
                raise ValueError(f"{who}: {name} must be from {least} to {most}, got {number}")
        if self.slot_nbytes < 16 or self.slot_nbytes & (self.slot_nbytes - 1):
            raise ValueError(f"{who}: slot_nbytes must be a power of two and at least 16, got {self.slot_nbytes}")
        for name, numel in (("slots", self.world_size), ("flags", self.world_size), ("error", 1)):
            check_flat(who, name, getattr(self, name), (torch.int64,), numel=numel, device=device)


def flag_numel(programs: int = PROGRAMS) -> int:
    """Return the number of int64 values in the flags of a rank."""
    return programs * 2 * _FLAG_STRIDE


def slots_nbytes(programs: int = PROGRAMS, depth: int = DEPTH, slot_nbytes: int = SLOT_NBYTES) -> int:
    """Return the bytes of a rank's slots: 8 MiB with the defaults."""
    return programs * depth * slot_nbytes


def ring_failure(error: Tensor) -> str | None:
    """Return a description of the failure in an error word [1], or `None`. Synchronizes with the device."""
    word = int(error.item())
    if not word:
        return None
    return f"epoch {word >> 32}, step {(word & 0xFFFFFFFF) >> 8}: {_REASONS[word & 0xFF]}"
