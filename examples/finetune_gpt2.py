"""Fine-tune a Hugging Face GPT-2 on bytes of text, generate text, and save the model for `from_pretrained`.

    torchrun --nproc-per-node 2 examples/finetune_gpt2.py --steps 100
    torchrun --nproc-per-node 2 examples/finetune_gpt2.py --model runs/gpt2 --checkpointing

The tied weights of embedding and head need no special code.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from shardlite import AdamW, ShardLite
from shardlite.cli.launch import process_group
from shardlite.lab.train.report import printable
from shardlite.lab.train.text import Bytes, draw_batch, read_corpus

CONTEXT, BATCH = 64, 8


def main() -> None:
    """Fine-tune the model. Every rank calls this function."""
    options = parse()
    text = read_corpus(None, context=CONTEXT, limit=1 << 20)
    with process_group() as device:
        finetune(options, text.train, text.validation, device)


def finetune(options: argparse.Namespace, train: Bytes, validation: Bytes, device: torch.device) -> None:
    """Load, train, validate, generate and save."""
    rank = dist.get_rank()
    torch.manual_seed(options.seed + rank)  # gives each rank different dropout; the weights come from rank 0
    net = make_model(options.model, reads=rank == 0)
    if options.checkpointing:
        enable = getattr(net, "activation_checkpointing_enable", None)  # older versions have a different name
        (enable or net.gradient_checkpointing_enable)()
    net.train()
    model = ShardLite(net, stage=options.stage, device=device)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    for step in range(options.steps):
        x, _ = draw_batch(train, shape=(BATCH, CONTEXT), key=(options.seed, rank, step))
        loss = model(input_ids=x.to(device), labels=x.to(device)).loss  # the model shifts the labels by itself
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}  loss of rank 0 {loss.item():.4f}", flush=True)

    model.eval()
    x, _ = draw_batch(validation, shape=(BATCH, CONTEXT), key=(options.seed, rank))
    with torch.no_grad():
        total = model(input_ids=x.to(device), labels=x.to(device)).loss
    dist.all_reduce(total)

    # Each rank continues a different text. With `synced_gpus`, a rank that has finished runs further forwards until all
    # ranks have finished: every forward gathers weights, so all ranks must run the same number of forwards.
    written = model.generate(x[:1, :16].to(device), max_new_tokens=48, do_sample=True, synced_gpus=True)

    weights = model.full_state_dict(rank=0)  # every rank calls this method, rank 0 gets the result
    if rank == 0:
        model.save_pretrained(options.out, state_dict=weights)
        print(f"validation {total.item() / dist.get_world_size():.4f}, saved in {options.out}")
        print(printable(bytes(written[0].tolist())), flush=True)


def make_model(folder: Path | None, *, reads: bool) -> GPT2LMHeadModel:
    """Return a model from a folder, or a small new one. If `reads` is False, the model is on the meta device."""
    shape = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 128, "n_layer": 4, "n_head": 4}
    small = GPT2Config(**shape, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    if not reads:
        with torch.device("meta"):
            return GPT2LMHeadModel(GPT2Config.from_pretrained(folder) if folder else small)
    return GPT2LMHeadModel.from_pretrained(folder) if folder else GPT2LMHeadModel(small)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a byte-level GPT-2; by default a small new model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt2"), help="folder for the model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
