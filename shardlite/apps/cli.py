"""The command line. Each subcommand is one function, beside the parser of its options."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardlite.apps.demo.settings import SIZES, GPTConfig, Settings
from shardlite.apps.footprint.command import add_footprint

_MOST_RANKS = 64  # in a picture
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `shardlite ARGV` and return its exit status. Wrong usage exits with status 2, as in argparse."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = ArgumentParser(prog="shardlite", description="Sharded training for PyTorch, small enough to read.")
    parser.add_argument("--version", action="version", version=f"shardlite {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_verify(commands)
    _add_doctor(commands)
    _add_plan(commands)
    add_footprint(commands)
    _add_memory(commands)
    _add_ring(commands)
    _add_report(commands)
    _add_inspect(commands)
    _add_export(commands)
    _add_import(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options, arguments)
    return status


def _add_train(commands: Any) -> None:
    parser: ArgumentParser = commands.add_parser(
        "train",
        help="train a small GPT on text, sharded over processes of this machine",
        description="Train a byte-level GPT on text, sharded over the ranks. Starts the ranks itself, or is started by"
        " torchrun. Prints the loss, the memory held beside that of plain data parallel, and some text by the model.",
    )
    parser.set_defaults(run=lambda options, arguments: _train(parser, options, arguments))
    _add_run_options(parser)
    _add_model_options(parser, size="demo")


def _add_verify(commands: Any) -> None:
    parser: ArgumentParser = commands.add_parser(
        "verify",
        help="train a small GPT sharded and in every other way, and compare the numbers",
        description="Train a byte-level GPT on random bytes: sharded at each stage, by data parallelism in a simple way"
        " and in PyTorch's, and in one process. Prints the largest differences and names the first tensor beyond its"
        " bound; the exit status is 1 then. Starts the ranks itself, or is started by torchrun.",
    )
    parser.set_defaults(run=lambda options, arguments: _verify(parser, options, arguments))
    group = parser.add_argument_group("run")
    group.add_argument("--ranks", type=int, metavar="N", help="processes (2)")
    for name, kind, metavar, default, meaning in (
        ("steps", int, "N", 4, "optimizer steps"),
        ("batch", int, "N", Settings.batch, "sequences per rank"),
        ("lr", float, "RATE", Settings.lr, "learning rate"),
        ("seed", int, "N", Settings.seed, "decides the first weights and the batches"),
    ):
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{meaning} ({default})")
    group.add_argument(
        "--elastic",
        action="store_true",
        help="train on fewer ranks, too, with order='tree': equal bits (powers of two)",
    )
    group.add_argument("--compute", choices=_DTYPES, help="what forward and backward run in (no casts)")
    group.add_argument("--reduce", choices=_DTYPES, default="fp32", help="what gradients are summed in (fp32)")
    _add_model_options(parser, size="tiny")


def _add_plan(commands: Any) -> None:
    parser: ArgumentParser = commands.add_parser(
        "plan",
        help="say what a training run will hold and send, before it",
        description="Print what each rank will hold at the peak of a step, by purpose, and send, for any number of"
        " ranks, and the predicted step time on a named cluster. The model is made of fake tensors: nothing is"
        " allocated, downloaded or trained, and no other process is started.",
    )
    parser.set_defaults(run=lambda options, arguments: _plan(parser, options))
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", required=True, metavar="MODEL", help="a preset (gpt2-xl), a Hugging Face config file, or module:name"
    )
    group.add_argument("--batch", type=int, default=8, metavar="N", help="sequences per rank (8)")
    group.add_argument("--context", type=int, metavar="N", help="tokens per sequence (the model's own)")
    group.add_argument("--inputs", metavar="MODULE:NAME", help="function that returns a batch, for other inputs")
    _add_plan_run(parser.add_argument_group("run", "As the arguments of ShardLite, Precision and AdamW."))
    group = parser.add_argument_group("output")
    group.add_argument("--card", metavar="CARD", help="H100 or 80GB: also find the fewest ranks that fit")
    group.add_argument("--cluster", metavar="NAME", help="dgx-h100, pcie-a100, ...: also predict the step time")
    group.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="draw plots, too; needs matplotlib")


def _add_plan_run(group: Any) -> None:
    group.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N", help="1 to 4096")
    group.add_argument("--stage", type=int, nargs="+", choices=(0, 1, 2, 3), default=[3], help="(3)")
    group.add_argument("--state", choices=("fp32", "bf16", "int8"), default="fp32", help="of the moments (fp32)")
    group.add_argument("--in-backward", action="store_true", help="step in the backward")
    group.add_argument("--compute", choices=_DTYPES, help="what forward and backward run in (no casts)")
    group.add_argument("--reduce", choices=_DTYPES, default="fp32", help="what gradients are summed in (fp32)")
    group.add_argument("--master", choices=("fp32", "split24"), default="fp32", help="format of the weights (fp32)")
    group.add_argument("--prefetch", type=int, default=1, metavar="N", help="units that are gathered ahead (1)")
    group.add_argument("--keep-unsharded", action="store_true", help="keep weights until the backward")
    group.add_argument(
        "--checkpoint", choices=("both", "with", "without"), default="both", help="activation checkpointing (both)"
    )


def _plan(parser: ArgumentParser, options: Namespace) -> int:
    """Print the plan, and write what else was asked for."""
    from shardlite.apps.options import usage_errors
    from shardlite.apps.plan.command import Request, run

    with usage_errors(parser, "--plots"):
        request = Request.of(options, {name: _dtype(name) for name in _DTYPES})
        print(run(request, progress=lambda words: print(f"{words} ...", file=sys.stderr, flush=True)))
    return 0


def _add_memory(commands: Any) -> None:
    from shardlite.apps.memory.options import add_options

    parser: ArgumentParser = commands.add_parser(
        "memory",
        help="measure what a training step holds, by purpose, and compare it with the plan",
        description="Train a model for some steps on CPU ranks of this machine, and print the live tensor bytes of one"
        " step on rank 0, by purpose, predicted and measured. With --timeline, draw them over the step, beside FSDP2's."
        " Starts the ranks itself, or is started by torchrun.",
    )
    parser.set_defaults(run=lambda options, arguments: _memory(parser, options, arguments))
    add_options(parser, _DTYPES)


def _memory(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Check the options, then start the ranks, or run as one of them."""
    from shardlite.apps.launch import launch
    from shardlite.apps.memory.command import Request, check, run
    from shardlite.apps.options import usage_errors

    started, ranks = _started_ranks(parser, options), options.ranks or 2
    with usage_errors(parser, "--timeline"):
        request = Request.of(options, {name: _dtype(name) for name in _DTYPES})
        if started is None:
            check(request, ranks)
    if started is None:
        return launch(ranks, arguments)
    run(request)
    return 0


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, _DTYPES[name])


def _add_ring(commands: Any) -> None:
    from shardlite.config import ALGORITHMS

    parser: ArgumentParser = commands.add_parser(
        "ring",
        help="show step by step how the segments of a buffer go round the ranks",
        description="Print, step by step, what each rank holds and sends in a collective, and in which order sums are"
        " added. Runs nothing and needs no other process.",
    )
    parser.set_defaults(run=lambda options, arguments: _ring(parser, options))
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="from 1 to 64 (4)")
    parser.add_argument(
        "--operation", choices=("all-gather", "reduce-scatter"), default="reduce-scatter", help="(reduce-scatter)"
    )
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ring", help="(ring)")
    parser.add_argument("--node", type=int, metavar="N", help="ranks per node; for hierarchical, and needed there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it as an image, too; needs matplotlib")


def _add_doctor(commands: Any) -> None:
    parser: ArgumentParser = commands.add_parser(
        "doctor",
        help="say what this machine offers, which way messages take here, and why",
        description="Starts some ranks, asks for each transport as the library would, tries those that can be had, and"
        " says why each choice was made. The exit status is 1 if one gave wrong results or an error.",
    )
    parser.set_defaults(run=lambda options, arguments: _doctor(parser, options, arguments))
    parser.add_argument("--ranks", type=int, metavar="N", help="processes (one per GPU, 2 without any)")


def _add_report(commands: Any) -> None:
    parser: ArgumentParser = commands.add_parser(
        "report",
        help="write one HTML page of what benches have measured",
        description="Write one HTML page of rows that benches have measured: plots, tables, machines, versions, and the"
        " commands that repeat them. It refers to no other file. Needs matplotlib.",
    )
    parser.set_defaults(run=lambda options, arguments: _report(parser, options))
    parser.add_argument(
        "rows",
        nargs="*",
        type=Path,
        default=[Path("bench", "results")],
        metavar="ROWS",
        help="files with one JSON object a line, or folders of them (bench/results)",
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="(report.html)")


def _report(parser: ArgumentParser, options: Namespace) -> int:
    """Write the page."""
    from shardlite.apps.report import write_report

    try:
        count = write_report(
            options.rows, options.out, progress=lambda words: print(f"{words} ...", file=sys.stderr, flush=True)
        )
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        parser.error("report needs matplotlib, which is not installed; pip install 'shardlite[demo]'")
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))
    print(f"wrote {options.out}: {count} rows")
    return 0


def _add_inspect(commands: Any) -> None:
    parser: ArgumentParser = commands.add_parser(
        "inspect",
        help="list what a checkpoint holds, and check its files",
        description="Print the step, the number of ranks, and each tensor of a checkpoint, and compare all files with"
        " their checksums. The exit status is 1 if a file is missing or damaged. Executes no code of the checkpoint.",
    )
    parser.set_defaults(run=lambda options, arguments: _inspect(options))
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of a run, or of one checkpoint")
    parser.add_argument("--no-check", action="store_true", help="do not read the files")


def _inspect(options: Namespace) -> int:
    from shardlite.apps.checkpoint.inspection import print_report

    return print_report(options.path, check=not options.no_check)


def _add_export(commands: Any) -> None:
    parser: ArgumentParser = commands.add_parser(
        "export",
        help="write the weights of a checkpoint as safetensors",
        description="Write the weights of a checkpoint into safetensors files with an index, as from_pretrained of"
        " Hugging Face reads them. Needs the package safetensors.",
    )
    parser.set_defaults(run=lambda options, arguments: _convert(options))
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of a run, or of one checkpoint")
    parser.add_argument("out", type=Path, metavar="FOLDER", help="where the files go")
    parser.add_argument("--dtype", choices=_DTYPES, help="convert weights to it (as they are kept)")


def _add_import(commands: Any) -> None:
    parser: ArgumentParser = commands.add_parser(
        "import",
        help="make a checkpoint of weights in safetensors files",
        description="Write a checkpoint with the weights of a folder of safetensors files, as save_pretrained of"
        " Hugging Face writes them. Needs the package safetensors.",
    )
    parser.set_defaults(run=lambda options, arguments: _convert(options))
    parser.add_argument("path", type=Path, metavar="FOLDER", help="with the files")
    parser.add_argument("out", type=Path, metavar="PATH", help="folder of a run: the checkpoint becomes its newest")


def _convert(options: Namespace) -> int:
    """Run `export`, which has an option, or `import`."""
    import torch

    from shardlite.apps.checkpoint.safetensors import export_weights, import_weights
    from shardlite.errors import CheckpointError

    try:
        if "dtype" in options:
            dtype = getattr(torch, _DTYPES[options.dtype]) if options.dtype else None
            print(*export_weights(options.path, options.out, dtype=dtype), sep="\n")
        else:
            print(import_weights(options.path, options.out))
    except CheckpointError as error:
        print(f"shardlite: {error}", file=sys.stderr)
        return 1
    return 0


def _doctor(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Start the ranks, or run as one of them."""
    from shardlite.apps.launch import default_ranks, launch

    if _started_ranks(parser, options) is None:
        return launch(options.ranks or default_ranks(), arguments)

    from shardlite.apps.doctor import examine

    return examine()


def _add_run_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--ranks", type=int, metavar="N", help="processes (one per GPU, 2 without any)")
    for name, kind, metavar, meaning in (
        ("steps", int, "N", "optimizer steps"),
        ("batch", int, "N", "sequences per rank in one forward"),
        ("accumulate", int, "N", "forwards and backwards per optimizer step"),
        ("lr", float, "RATE", "highest learning rate"),
        ("seed", int, "N", "decides the first weights and the batches"),
        ("out", Path, "FOLDER", "where the loss curve goes"),
    ):
        default = getattr(Settings, name)
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{meaning} ({default})")
    group.add_argument(
        "--checkpoints", type=Path, metavar="FOLDER", help="save the run there, and go on from the newest checkpoint"
    )
    group.add_argument(
        "--save-every", type=int, default=Settings.save_every, metavar="N", help=f"steps ({Settings.save_every})"
    )
    group.add_argument(
        "--redundancy",
        choices=("neighbour",),
        help="copy the run into memory after each step, for ranks that start again (no copies)",
    )
    group.add_argument("--restarts", type=int, default=0, metavar="N", help="how often failed ranks start again (0)")
    group.add_argument("--data", type=Path, metavar="PATH", help="text file or folder (the source of Python itself)")
    group.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), default=3, help="of ZeRO: 0 shards nothing, 3 all (3)"
    )


def _add_model_options(parser: ArgumentParser, size: str) -> None:
    group = parser.add_argument_group("model", "A size by name, of which each number can be changed.")
    group.add_argument("--size", choices=SIZES, default=size, help=f"({size})")
    group.add_argument("--layers", type=int, metavar="N", help="blocks")
    group.add_argument("--width", type=int, metavar="N", help="numbers that stand for one byte between the blocks")
    group.add_argument("--heads", type=int, metavar="N", help="parts of the width that attend separately")
    group.add_argument("--context", type=int, metavar="N", help="bytes that the model sees at once")


def _train(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Check the options, then start the ranks, or run as one of them."""
    from shardlite.apps.launch import default_ranks, launch

    started = _started_ranks(parser, options)
    try:
        settings = _train_settings(options)
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))
    if started is None:
        return launch(options.ranks or default_ranks(), arguments, restarts=options.restarts)

    from shardlite.apps.demo.train import train

    train(settings)
    return 0


def _train_settings(options: Namespace) -> Settings:
    """Return the settings for `options`, after checking that the text is readable and the folder writable."""
    from shardlite.apps.demo.text import read_corpus

    settings = Settings(
        gpt=_gpt_config(options),
        stage=options.stage,
        steps=options.steps,
        batch=options.batch,
        accumulate=options.accumulate,
        lr=options.lr,
        seed=options.seed,
        data=options.data,
        out=options.out,
        checkpoints=options.checkpoints,
        save_every=options.save_every,
        redundancy=options.redundancy,
    )
    read_corpus(settings.data, context=settings.gpt.context)
    settings.out.mkdir(parents=True, exist_ok=True)
    return settings


def _verify(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Check the options, then start the ranks, or run as one of them."""
    from shardlite.apps.launch import launch

    started = _started_ranks(parser, options)
    try:
        numbers = {name: getattr(options, name) for name in ("steps", "batch", "lr", "seed")}
        settings = Settings(gpt=_gpt_config(options), **numbers)
    except ValueError as wrong:
        parser.error(str(wrong))
    if started is None:
        return launch(options.ranks or 2, arguments)
    return _verify_gpt(settings, options.compute, options.reduce, elastic=options.elastic)


def _verify_gpt(settings: Settings, compute: str | None, reduce: str, *, elastic: bool) -> int:
    """Compare on random bytes, as one of the ranks."""
    import torch
    import torch.distributed as dist

    from shardlite import Precision, verify
    from shardlite.apps.demo.gpt import BYTE_VALUES, GPT

    def batch(_step: int, _rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(BYTE_VALUES, (settings.batch, settings.gpt.context + 1))
        return text[:, :-1], text[:, 1:]

    computing = None if compute is None else getattr(torch, _DTYPES[compute])
    dist.init_process_group("gloo")
    try:
        report = verify(
            lambda: GPT(settings.gpt),
            batch,
            settings.steps,
            lr=settings.lr,
            precision=Precision(compute=computing, reduce=getattr(torch, _DTYPES[reduce])),
            seed=settings.seed,
            elastic=elastic,
        )
        if dist.get_rank() == 0:
            print(report.table(), flush=True)
        dist.barrier()  # torchrun ends all ranks when one fails: wait until the table is printed
    finally:
        dist.destroy_process_group()
    return 0 if report.ok else 1


def _ring(parser: ArgumentParser, options: Namespace) -> int:
    """Print the picture of a schedule, and write the image if a file is given."""
    from shardlite.apps.ring_picture import text
    from shardlite.comm import schedule as schedules

    if not 1 <= options.ranks <= _MOST_RANKS:
        parser.error(f"--ranks is {options.ranks}; pictures are made for 1 to {_MOST_RANKS} ranks")
    if options.algorithm == "hierarchical" and options.node is None:
        parser.error(f"--algorithm hierarchical needs --node: ranks per node, a divisor of {options.ranks}")
    node = 1 if options.node is None else options.node
    make = schedules.all_gather if options.operation == "all-gather" else schedules.reduce_scatter
    try:
        schedule = make(options.algorithm, options.ranks, node=node)
        if options.png is not None:
            from shardlite.apps.painting import paint

            paint(schedule, options.png, node)
    except ModuleNotFoundError:
        parser.error("--png needs matplotlib, which is not installed; pip install 'shardlite[demo]'")
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))
    print(text(schedule, node))
    if options.png is not None:
        print(f"\nwrote {options.png}")
    return 0


def _started_ranks(parser: ArgumentParser, options: Namespace) -> int | None:
    """Return the number of ranks that a launcher has started, or `None`. It must agree with `--ranks`."""
    from shardlite.apps.launch import world_size

    started = world_size()
    if options.ranks is not None and (options.ranks < 1 or started not in (None, options.ranks)):
        parser.error(f"--ranks is {options.ranks}; it must be at least 1, and what torchrun started ({started})")
    return started


def _gpt_config(options: Namespace) -> GPTConfig:
    """Return the named size with the given numbers replaced."""
    numbers = {name: getattr(options, name) for name in ("layers", "width", "heads", "context")}
    return replace(SIZES[options.size], **{name: value for name, value in numbers.items() if value is not None})


def _version() -> str:
    try:
        return version("shardlite")
    except PackageNotFoundError:
        return "(not installed)"
