"""What `unwrap` and every refusal must leave as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class ModelState:
    """Class, attributes, hooks and tensors of a model and its modules at one moment."""

    classes: list[type]
    attributes: list[set[str]]
    hooks: list[dict[str, list[Any]]]
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelState:
        modules = list(model.modules())
        return cls(
            classes=[type(module) for module in modules],
            attributes=[set(vars(module)) for module in modules],
            hooks=[
                {
                    name: list(value.items())
                    for name, value in vars(module).items()
                    if is_hooks(name)
                }
                for module in modules
            ],
            tensors={name: tensor.clone() for name, tensor in model.state_dict().items()},
            config=model.config.to_dict(),
            generation_config=model.generation_config.to_dict(),
        )

    def check_same(self, model: PreTrainedModel) -> None:
        now = ModelState.of(model)
        assert now.classes == self.classes
        assert now.attributes == self.attributes
        assert now.hooks == self.hooks
        assert now.config == self.config
        assert now.generation_config == self.generation_config
        assert now.tensors.keys() == self.tensors.keys()
        for name, tensor in now.tensors.items():
            assert torch.equal(tensor, self.tensors[name]), name


def is_hooks(attribute: str) -> bool:
    return attribute.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
