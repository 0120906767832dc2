"""Start a target from a trained one: of its own family, or a Qwen3-MoE of the same widths.

Embedding, norms and attention carry over once Qwen3's norm of every query and key head is folded
into the projections (by the mean size of each head over training rows). Experts and routers carry
over as they are where the layout is the same; for GPT-OSS, with half as many experts of twice the
width, experts that are often chosen together become one. The start is the source's function nearly
(OLMoE) or roughly (GPT-OSS); training goes on from there with other batches.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from training_data import Batch

_NEGLIGIBLE_SINK = -4.0  # a logit that takes almost nothing from the attention of the source


@torch.no_grad()
def start_from(source_folder: Path, model: PreTrainedModel, batch: Batch) -> None:
    """Copy what `model` can use of the source; `batch` gives the typical sizes."""
    source = AutoModelForCausalLM.from_pretrained(source_folder, dtype=torch.float32).eval()
    if source.config.model_type == model.config.model_type:
        model.load_state_dict(source.state_dict())
        return
    sizes: dict[str, Tensor] = {}
    gate_sums: list[float] = []
    together: list[Tensor] = []
    head_dim = source.config.head_dim
    for i, layer in enumerate(source.model.layers):
        for name in ("q_proj", "k_proj"):

            def keep(module: object, inputs: object, out: Tensor, key: str = f"{i}.{name}") -> None:
                heads = out.reshape(-1, out.shape[-1] // head_dim, head_dim)
                sizes[key] = heads.pow(2).mean(-1).sqrt().mean(0)

            getattr(layer.self_attn, name).register_forward_hook(keep)

        def keep_sum(module: object, inputs: object, out: tuple[Tensor, Tensor, Tensor]) -> None:
            gate_sums.append(out[0].softmax(-1).gather(-1, out[2]).sum(-1).mean().item())
            chosen = torch.zeros_like(out[0]).scatter_(-1, out[2], 1.0)
            together.append(chosen.T @ chosen)

        layer.mlp.gate.register_forward_hook(keep_sum)
    source.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)

    given, own = source.state_dict(), model.state_dict()
    for name, value in given.items():
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for name in ("q", "k"):
            weight = given[f"model.layers.{i}.self_attn.{name}_proj.weight"]
            norm = given[f"model.layers.{i}.self_attn.{name}_norm.weight"]
            scale = (1 / sizes[f"{i}.{name}_proj"])[:, None].expand(-1, head_dim)
            own_norm = getattr(attention, f"{name}_norm", None)
            if own_norm is None:
                scale = scale * norm
            else:  # one norm over all heads, which sees heads of equal size
                own_norm.weight.copy_(norm.repeat(scale.shape[0]))
            getattr(attention, f"{name}_proj").weight.copy_(weight * scale.reshape(-1, 1))
        if hasattr(attention, "sinks"):
            attention.sinks.fill_(_NEGLIGIBLE_SINK)
        if not getattr(model.config, "norm_topk_prob", True):
            # Gates that are not renormalised sum to less than one.
            layer.mlp.experts.down_proj.div_(gate_sums[i])
        if hasattr(layer.mlp, "router"):
            merge_experts(source.model.layers[i].mlp, layer.mlp, together[i])


def merge_experts(given: torch.nn.Module, own: torch.nn.Module, together: Tensor) -> None:
    """Fill GPT-OSS experts with pairs of Qwen3-MoE experts; `together` [E, E] counts rows."""
    pairs = _pairs(together)
    first, second = pairs[:, 0], pairs[:, 1]
    weight = given.gate.weight
    own.router.weight.copy_((weight[first] + weight[second]) / 2)
    own.router.bias.zero_()
    gate, up = given.experts.gate_up_proj.chunk(2, dim=1)  # [E, I, H] each
    down = given.experts.down_proj  # [E, H, I]
    alpha = own.experts.alpha
    # (up + 1) * gate * sigmoid(alpha * gate) is up * silu(gate) / alpha once the gate is divided
    # by alpha and the 1 is taken off; each half of a pair gets about half of the pair's weight.
    inner = own.experts.gate_up_proj.shape[-1] // 2
    half = inner // 2
    own.experts.gate_up_proj_bias.zero_()
    own.experts.gate_up_proj_bias[:, 1::2] = -1.0
    own.experts.down_proj_bias.zero_()
    for part, ids in ((slice(0, half), first), (slice(half, inner), second)):
        columns = torch.arange(inner)[part]
        own.experts.gate_up_proj[:, :, 2 * columns] = gate[ids].transpose(1, 2) / alpha
        own.experts.gate_up_proj[:, :, 2 * columns + 1] = up[ids].transpose(1, 2)
        own.experts.down_proj[:, part] = down[ids].transpose(1, 2) * alpha / 2


def _pairs(together: Tensor) -> Tensor:
    """[E / 2, 2]: experts matched greedily, those chosen together most often first."""
    left = together.float().fill_diagonal_(-1.0)
    pairs = []
    for _ in range(left.shape[0] // 2):
        a, b = divmod(int(left.argmax()), left.shape[0])
        pairs.append((a, b))
        left[[a, b]] = -1.0
        left[:, [a, b]] = -1.0
    return torch.tensor(pairs)
