"""Stand-ins for what programs of the Hugging Face Hub download: a data set, a tokenizer, a model and a metric.

`python hub.py PROGRAM ARGS` runs a program with them. With `LOSSES=FILE`, each differentiated loss is appended to
`FILE.<rank>` in hexadecimal.
"""

import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class Examples(list[dict[str, Any]]):
    """A data set in memory, with the methods of `datasets.Dataset` that the programs call."""

    def map(self, function: Any, **_: Any) -> "Examples":
        made = function({key: [each[key] for each in self] for key in self[0]})
        rows = [{key: made[key][i] for key in made} for i in range(len(self))]
        return Examples([{**row, "labels": each["label"]} for row, each in zip(rows, self, strict=True)])


class Splits(dict[str, Examples]):
    """The splits of a data set."""

    def map(self, function: Any, **options: Any) -> "Splits":
        return Splits({name: each.map(function, **options) for name, each in self.items()})

    def rename_column(self, *_: Any) -> "Splits":
        return self


def load_dataset(*_: Any, **__: Any) -> Splits:
    """Return pairs of sentences of the kind of GLUE's MRPC."""
    sentences = [f"sentence number {i}" + " and more" * (i % 4) for i in range(40)]
    rows = [
        {"idx": i, "sentence1": each, "sentence2": sentences[(i * 7) % 40], "label": i % 2}
        for i, each in enumerate(sentences)
    ]
    return Splits(train=Examples(rows), validation=Examples(rows[:12]))


class Batch(dict[str, torch.Tensor]):
    """A batch as a tokenizer returns it."""

    def to(self, device: Any) -> "Batch":
        return Batch({key: value.to(device) for key, value in self.items()})


class Tokenizer:
    """Tokens are letters."""

    def __call__(self, first: list[str], second: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) % 60 + 1 for c in a[:12] + b[:12]] for a, b in zip(first, second, strict=True)]}

    def pad(self, examples: list[dict[str, Any]], **_: Any) -> Batch:
        longest = max(len(each["input_ids"]) for each in examples)
        rows = [each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in examples]
        ids = torch.tensor(rows)
        labels = torch.tensor([each["labels"] for each in examples])
        return Batch(input_ids=ids, attention_mask=(ids > 0).long(), labels=labels)


class Accuracy:
    """The metric `accuracy`."""

    def __init__(self) -> None:
        self.right: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.right += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        right, self.right = self.right, []
        return {"accuracy": sum(right) / len(right)}


def provide() -> None:
    """Put the stand-ins in place."""
    import datasets
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model, tokenizer = transformers.AutoModelForSequenceClassification, transformers.AutoTokenizer
    model.from_pretrained = lambda *_, **__: transformers.BertForSequenceClassification(config)
    tokenizer.from_pretrained = lambda *_, **__: Tokenizer()
    datasets.load_dataset = load_dataset
    sys.modules["evaluate"] = evaluate = ModuleType("evaluate")
    evaluate.load = lambda *_: Accuracy()


def log_losses(path: str) -> None:
    """Write each scalar whose backward is called."""
    file, backward = Path(f"{path}.{os.environ['RANK']}"), torch.Tensor.backward
    file.write_text("")

    def logged(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if loss.numel() == 1:
            file.write_text(file.read_text() + loss.item().hex() + "\n")
        return backward(loss, *args, **kwargs)

    torch.Tensor.backward = logged


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    provide()
    if "LOSSES" in os.environ:
        log_losses(os.environ["LOSSES"])
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
