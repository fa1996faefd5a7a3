"""`generate()` of a wrapped model, between steps: tokens and logits are those of the twin to the bit.

It is a method of the wrapped module, which calls the module's forward once for each new token. Hugging Face's models
keep keys between these calls, ours begins anew.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.hf import ARCHITECTURES, case, drawn_tokens
from tests.support.twins.sharded import WIDE, Pair, Turn, same_bits

GUARDS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def generated(model: nn.Module, prompt: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Continue a prompt, in evaluation: the tokens and the logits that they were chosen from."""
    model.eval()
    settings = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5} | settings
    answer = model.generate(input_ids=prompt, output_logits=True, return_dict_in_generate=True, **settings)
    model.train()
    return answer.sequences, torch.stack(answer.logits)


def generate_alike(pair: Pair, turn: Turn, **settings: Any) -> None:
    """Let both continue this rank's own prompt, and draw the same numbers if they sample."""
    pair.twin.refresh()
    answers = [generated(model, drawn_tokens(turn), **settings) for model in (pair.twin.module, pair.model)]
    for what, expected, got in zip(("tokens", "logits"), *answers, strict=True):
        same_bits(f"{what} of {turn}", got, expected)


def generates_between_steps(group: Any, name: str, guard: str, settings: dict[str, Any], stage: int = 3) -> None:
    """Body of a rank: before the first step, after each, and twice in a row."""
    pair = Pair(ARCHITECTURES[name].make, group, stage=stage)
    for step in range(2):
        with GUARDS[guard]():
            generate_alike(pair, Turn(step, pair.rank, 0), **settings)
            generate_alike(pair, Turn(step, pair.rank, 1), use_cache=False)
        pair.step(ARCHITECTURES[name].loss)
    generate_alike(pair, Turn(2, pair.rank, 0), **settings)


GREEDY: dict[str, Any] = {}
BEAMS = {"num_beams": 2}
SAMPLING = {"do_sample": True, "top_k": 9}


@pytest.mark.parametrize("world_size", [2, WIDE])
@pytest.mark.parametrize(
    ("name", "guard", "settings"),
    [
        case("ours", "no_grad", SAMPLING),
        case("ours", "inference_mode", GREEDY),
        case("gpt2", "no_grad", SAMPLING),
        case("llama", "inference_mode", GREEDY),
        case("t5", "inference_mode", BEAMS),
    ],
)
def test_generates_like_the_twin_between_steps(cluster, world_size, name, guard, settings):
    cluster.check(generates_between_steps, world_size, name, guard, settings)


@pytest.mark.parametrize("name", [case("ours"), case("gpt2")])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_generates_at_other_stages(cluster, name, stage):
    cluster.check(generates_between_steps, 2, name, "inference_mode", GREEDY, stage=stage)


@pytest.mark.parametrize(("name", "group"), [case("ours", 2), case("llama", 4)], indirect=["group"])
def test_ranks_that_stop_at_other_lengths_go_on_together(group: Any, name: str) -> None:
    """`synced_gpus=True` is Hugging Face's own: ranks call the model until all are done.

    A rank wants more tokens than those before it.
    """
    pair = Pair(ARCHITECTURES[name].make, group)
    for step in range(2):
        pair.step(ARCHITECTURES[name].loss)
        pair.twin.refresh()
        prompt, length = drawn_tokens(Turn(step, pair.rank, 0)), {"max_new_tokens": 2 + 2 * pair.rank}
        expected, _ = generated(pair.twin.module, prompt, **length, min_new_tokens=0)
        got, _ = generated(pair.model, prompt, **length, min_new_tokens=0, synced_gpus=True)
        same_bits("tokens", got, expected)


@pytest.mark.parametrize("name", [*map(case, ["ours", "gpt2", "llama"])])
def test_generates_between_a_forward_and_its_backward(group: Any, name: str) -> None:
    """As if a model is asked for samples during a step."""
    pair = Pair(ARCHITECTURES[name].make, group)

    def loss(model: Any, turn: Turn) -> Tensor:
        value = ARCHITECTURES[name].loss(model, turn)
        with torch.no_grad():
            tokens, _ = generated(model.module, drawn_tokens(turn))
        return value + model(input_ids=tokens, labels=tokens).loss

    for _ in range(2):
        pair.step(loss)
