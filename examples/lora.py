"""Train LoRA adapters of a Hugging Face Llama with PEFT, and save them in PEFT's format.

    torchrun --nproc-per-node 2 examples/lora.py --steps 100
    torchrun --nproc-per-node 2 examples/lora.py --model runs/llama --out runs/adapters

The frozen base model is sharded too, and takes no memory for gradients and optimizer state.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from shardlite import AdamW, ShardLite
from shardlite.cli.launch import process_group
from shardlite.lab.train.text import Bytes, draw_batch, read_corpus
from shardlite.telemetry.ledger import format_bytes

CONTEXT, BATCH = 64, 8
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> None:
    """Train the adapters. Every rank calls this function."""
    options = parse()
    text = read_corpus(None, context=CONTEXT, limit=1 << 20)
    with process_group() as device:
        train_adapters(options, text.train, text.validation, device)


def train_adapters(options: argparse.Namespace, train: Bytes, validation: Bytes, device: torch.device) -> None:
    """Add adapters to a base model, train, validate, and save the adapters."""
    rank = dist.get_rank()
    torch.manual_seed(options.seed)
    net = get_peft_model(make_base(options.model), LORA)  # freezes the base, adds adapters
    model = ShardLite(net, stage=options.stage, device=device)
    optimizer = AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)

    for step in range(options.steps):
        x, _ = draw_batch(train, shape=(BATCH, CONTEXT), key=(options.seed, rank, step))
        loss = model(input_ids=x.to(device), labels=x.to(device)).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        if rank == 0 and step == 0:
            report(model)
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}  loss of rank 0 {loss.item():.4f}", flush=True)

    model.eval()
    x, _ = draw_batch(validation, shape=(BATCH, CONTEXT), key=(options.seed, rank))
    with torch.no_grad():
        total = model(input_ids=x.to(device), labels=x.to(device)).loss
    dist.all_reduce(total)

    weights = model.full_state_dict(rank=0)  # every rank calls this method, rank 0 gets the result
    if rank == 0:
        model.save_pretrained(options.out, state_dict=weights)  # PEFT saves only the adapters
        print(f"validation {total.item() / dist.get_world_size():.4f}, adapters saved in {options.out}", flush=True)


def report(model: ShardLite) -> None:
    """Print the number of trained parameters, and the bytes that this rank holds after a step."""
    whole = sum(p.numel() for p in model.module.parameters())
    trained = sum(p.numel() for p in model.module.parameters() if p.requires_grad)
    with_gradient = sorted(name for name, p in model.named_parameters() if p.grad is not None)
    print(
        f"{whole:,} parameters, {trained:,} are trained; {len(with_gradient)} have gradients: {with_gradient[0]}, ..."
    )
    for purpose, held in model.memory().items():
        print(f"{purpose:>18}  {format_bytes(held.now)} now, {format_bytes(held.peak)} at most", flush=True)


def make_base(folder: Path | None) -> LlamaForCausalLM:
    """Return a model from a folder, or a small new one."""
    if folder is not None:
        return LlamaForCausalLM.from_pretrained(folder)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **shape))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a byte-level Llama; by default a small new model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/adapters"), help="folder for the adapters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
