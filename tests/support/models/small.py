"""Small models for tests; each has a property that is easily handled wrongly when parameters are sharded.

Sizes are odd on purpose: almost no parameter is a multiple of 32 elements, so cuts between ranks fall inside
parameters.

Legend: `B` rows of a batch, `T` tokens in a row, `D` width.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 37
WIDTH = 20


class Block(nn.Module):
    """A pre-norm transformer block, [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int = WIDTH, heads: int = 2, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 3)
        self.down = nn.Linear(2 * width + 3, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.qkv(self.norm(x))))
        hidden = functional.gelu(self.up(self.mlp_norm(x)))
        return x + functional.dropout(self.down(hidden), self.dropout, self.training)

    def attend(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class LanguageModel(nn.Module):
    """Tokens [B, T] -> logits [B, T, VOCABULARY]. `reentrant` chooses a kind of activation checkpointing, or `None`.

    With checkpointing every `span` blocks are recomputed together.
    """

    def __init__(
        self, blocks: int = 2, *, tied: bool = True, dropout: float = 0.0, reentrant: bool | None = None, span: int = 1
    ):
        super().__init__()
        self.reentrant = reentrant
        self.span = span
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout=dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.reentrant is None:
            for block in self.blocks:
                x = block(x)
        else:
            x = self.run_checkpointed(x)
        return self.head(self.norm(x))

    def run_checkpointed(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x.requires_grad_()  # a frozen embedding: reentrant checkpointing cuts the graph without it
        for start in range(0, len(self.blocks), self.span):
            x = checkpoint(run_all, self.blocks[start : start + self.span], x, use_reentrant=self.reentrant)
        return x


def run_all(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable update of low rank."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.2)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def with_lora(model: LanguageModel, rank: int = 2) -> LanguageModel:
    """Freeze all of `model` and give every block trainable adapters."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv = LoRALinear(block.qkv, rank)
        block.down = LoRALinear(block.down, rank)
    return model


class MLP(nn.Sequential):
    """Linear layers of these widths with GELU between, [B, widths[0]] -> [B, widths[-1]]."""

    def __init__(self, widths: Sequence[int]):
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.GELU()]
        super().__init__(*layers[:-1])


def named(**modules: nn.Module) -> nn.Sequential:
    """Return modules that run one after the other, under these names."""
    return nn.Sequential(OrderedDict(modules))


class Residual(nn.Module):
    """A residual block of two linear layers, [B, D] -> [B, D]."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class MixedBlock(nn.Module):
    """Parameters of three dtypes, frozen and not, of 0 to 3 dimensions, of 0 and more elements. [B, 7] -> [B, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(7, 11, dtype=torch.float64) / 3)
        self.gain = nn.Parameter(torch.ones(()))
        self.low = nn.Parameter(torch.randn(11, 33).bfloat16() / 4)
        self.frozen = nn.Parameter(torch.randn(33, 5), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(1, 1, 1, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.nothing = nn.Parameter(torch.empty(0, 7))
        self.back = nn.Parameter(torch.randn(5, 7) / 6)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(x.double() @ self.wide * self.scale)
        low = torch.tanh(wide.bfloat16() @ self.low + self.shift.view(1))
        narrow = low.float() @ (self.frozen / 6) * self.gain
        narrow = torch.cat([narrow[:, :3] + self.bias, narrow[:, 3:]], dim=1)
        return x + narrow @ self.back + self.nothing.sum()


class MixedDtypes(nn.Sequential):
    """Two units of mixed dtypes, and a root. [B, 7] -> [B, 1]."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(MixedBlock(), MixedBlock()), nn.Linear(7, 1))


class Scale(nn.Module):
    """One parameter with one element and, if `bias`, a second with two. [B, 2] -> [B, 2]."""

    def __init__(self, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(()) + 1)
        self.bias = nn.Parameter(torch.randn(2)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x * self.weight)
        return x if self.bias is None else x + self.bias


class Context(nn.Module):
    """A block that is called twice, with another one between, and a block that is never called. [B, 6] -> [B, 6].

    Its second call is checkpointed, if at all, so the first one's graph has its weights and the second one's has not.
    """

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList([Residual(6, 9) for _ in range(3)])
        self.spare = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        twice, once, _never = self.blocks
        x = once(twice(x))
        return twice(x) if self.reentrant is None else checkpoint(twice, x, use_reentrant=self.reentrant)


class Branches(nn.Module):
    """One unit with several branches, of which a forward takes one or none. [B, 6] -> [B, 6]."""

    def __init__(self, branches: int = 3):
        super().__init__()
        self.choices = nn.ModuleDict({f"branch{i}": nn.Linear(6, 6) for i in range(branches)})
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor, branch: int | None) -> Tensor:
        if branch is not None:
            x = torch.tanh(self.choices[f"branch{branch}"](x))
        return self.out(x)


class Branching(nn.Module):
    """Units that every rank runs, each with branches of its own. [B, 6] -> [B, 6]."""

    def __init__(self, units: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList([Branches() for _ in range(units)])

    def forward(self, x: Tensor, branch: int | None) -> Tensor:
        for block in self.blocks:
            x = block(x, branch)
        return x


# ---- a model in the manner of Hugging Face's ------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Has no `reset_parameters`: `CausalLM._init_weights` knows it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


class Rotary(nn.Module):
    """Turns pairs of numbers by angles that grow with the position. Its buffer is not saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.speeds(width), persistent=False)

    @staticmethod
    def speeds(width: int) -> Tensor:
        return 10.0 ** -(torch.arange(0, width, 2) / width)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None] * self.inv_freq
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class CausalBlock(nn.Module):
    """Mixes a token with the mean of those before it, then a gated perceptron, [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, hidden: int, rotary: Rotary) -> None:
        super().__init__()
        self.norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width)
        self.rotary_emb = rotary

    def forward(self, x: Tensor) -> Tensor:
        turned = self.rotary_emb(self.mix(self.norm(x)))
        x = x + turned.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


@dataclass
class CausalOutput:
    """What a `CausalLM` or its body returns."""

    last_hidden_state: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None


@dataclass
class Generated:
    """Tokens [B, T], and the logits that the new ones were chosen from, each [B, vocabulary]."""

    sequences: Tensor
    logits: list[Tensor]


class CausalBody(nn.Module):
    """Tokens [B, T], or what they are embedded to [B, T, D], -> [B, T, D]."""

    def __init__(self, vocabulary: int, width: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.rotary_emb = Rotary(width)
        self.layers = nn.ModuleList(CausalBlock(width, hidden, self.rotary_emb) for _ in range(blocks))
        self.norm = RMSNorm(width)

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> CausalOutput:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        return CausalOutput(last_hidden_state=self.norm(x))


class CausalLM(nn.Module):
    """Has the parts, names, arguments and outputs of Hugging Face's decoders, and their ways to begin and to write."""

    def __init__(self, vocabulary: int, width: int, hidden: int, blocks: int = 2) -> None:
        super().__init__()
        self.model = CausalBody(vocabulary, width, hidden, blocks)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Give a module's own parameters and buffers values."""
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(std=0.2)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, Rotary):
            module.inv_freq.copy_(Rotary.speeds(2 * module.inv_freq.numel()))

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None
    ) -> CausalOutput:
        logits = self.lm_head(self.model(input_ids, inputs_embeds).last_hidden_state)
        if labels is None:
            return CausalOutput(logits=logits)
        return CausalOutput(
            logits=logits, loss=functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        )

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        do_sample: bool = False,
        synced_gpus: bool = False,
        **_settings: Any,
    ) -> Generated:
        """Call the model for each new token. With `synced_gpus` ranks that are done go on until all are."""
        output = Generated(input_ids, [])
        while (wants := len(output.logits) < max_new_tokens) or synced_gpus:
            if synced_gpus:
                dist.all_reduce(any_wants := torch.tensor(int(wants)), dist.ReduceOp.MAX)
                if not any_wants:
                    break
            logits = self(input_ids=output.sequences).logits[:, -1]
            if wants:
                chosen = torch.multinomial(logits.softmax(-1), 1) if do_sample else logits.argmax(-1, keepdim=True)
                output = Generated(torch.cat([output.sequences, chosen], dim=1), [*output.logits, logits])
        return output


# ---- changes of models ----------------------------------------------------------------------------------------------


def compiled(model: nn.Module, *, in_place: bool, **options: object) -> nn.Module:
    """Compile each block: by `block.compile()`, or by `torch.compile(block)` in its place."""
    for i, block in enumerate(model.blocks):
        if in_place:
            block.compile(**options)
        else:
            model.blocks[i] = torch.compile(block, **options)
    return model


def frozen(model: nn.Module, which: Callable[[str], bool]) -> nn.Module:
    """Freeze the parameters whose names `which` chooses."""
    for name, param in model.named_parameters():
        param.requires_grad_(not which(name))
    return model
