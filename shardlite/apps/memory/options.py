"""Options of `shardlite memory`. Light to import."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path


def add_options(parser: ArgumentParser, dtypes: Iterable[str]) -> None:
    """Add the options of the model, of the run and of the output to `parser`."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a preset (demo-demo), a Hugging Face config file, or module:name",
    )
    group.add_argument("--batch", type=int, default=1, metavar="N", help="sequences per rank (1)")
    group.add_argument("--context", type=int, metavar="N", help="tokens per sequence (the model's own)")
    group.add_argument("--inputs", metavar="MODULE:NAME", help="function that returns a batch, for other inputs")
    group = parser.add_argument_group("run", "As the arguments of ShardLite, Precision and AdamW.")
    group.add_argument("--ranks", type=int, metavar="N", help="processes (2)")
    group.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="(3)")
    group.add_argument("--state", choices=("fp32", "bf16", "int8"), default="fp32", help="of the moments (fp32)")
    group.add_argument("--in-backward", action="store_true", help="step in the backward")
    group.add_argument("--compute", choices=dtypes, help="what forward and backward run in (no casts)")
    group.add_argument("--reduce", choices=dtypes, default="fp32", help="what gradients are summed in (fp32)")
    group.add_argument("--master", choices=("fp32", "split24"), default="fp32", help="format of the weights (fp32)")
    group.add_argument("--prefetch", type=int, default=1, metavar="N", help="units that are gathered ahead (1)")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--timeline", type=Path, metavar="FILE", help="draw the step as a PNG, beside FSDP2's; needs matplotlib"
    )
