"""`wrap`, `unwrap`, and what a wrapped model's `generate` does."""

from __future__ import annotations

import copyreg
import os
import time
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer

from acceptmoe.decoding.audit import Auditor, check_audit
from acceptmoe.decoding.compiled import make_compiled_passes
from acceptmoe.decoding.emission import HeldStreamer, TokenEmitter
from acceptmoe.decoding.loop import decode
from acceptmoe.decoding.online_table import OnlineCommitmentTable
from acceptmoe.decoding.session import Session
from acceptmoe.decoding.turns import turns_of
from acceptmoe.decoding.verify import Prefix
from acceptmoe.drafting import Drafter, load_drafter
from acceptmoe.errors import (
    InvalidArgumentError,
    TableError,
    UnsupportedGenerateError,
    WrapStateError,
)
from acceptmoe.models.adapter import MoEAdapter, num_token_ids
from acceptmoe.models.experts import ExpertsPatch, check_experts_name
from acceptmoe.models.kv import cache_capacity, check_cache, make_cache, num_cached_tokens
from acceptmoe.models.patching import self_check
from acceptmoe.policies import POLICIES, RoutingPolicy, load_policy
from acceptmoe.table import CommitmentTable, config_fingerprint
from acceptmoe.tree import MAX_NODES

ALL_CACHE_NAMES = ("cache", "past_key_values")  # by Transformers version

Model = TypeVar("Model", bound=PreTrainedModel)
"""The class of the model that goes into `wrap` and comes out again."""


def wrap(
    model: Model,
    table: CommitmentTable | str | os.PathLike[str] | None = None,
    *,
    drafter: Drafter | PreTrainedModel | str | os.PathLike[str] = "ngram",
    policy: RoutingPolicy | str | None = None,
    num_nodes: int = 32,
    max_depth: int = 5,
    experts: str | None = None,
    compile: bool | str = False,
    audit: float = 0.0,
    max_kl: float | None = None,
    guard: bool = False,
    allow_table_mismatch: bool = False,
) -> Model:
    """`model` itself, whose `generate` now decodes by speculative trees on few experts.

    Only this instance changes, and `unwrap` undoes it. Forwards outside `generate` stay bit for bit
    what they were. Counts are at `model.acceptmoe.report()`.

    Args:
        model: A supported mixture-of-experts causal language model of Transformers.
        table: The `CommitmentTable` of this target and drafter, its path, or a shipped table's
            name; an `OnlineCommitmentTable` goes on learning while it decodes. None is allowed
            where the policy reads none (`policy="natural"`).
        drafter: "ngram" (prompt lookup, no weights), a causal language model with the target's
            vocabulary, a checkpoint folder, or any `Drafter`.
        policy: "accept" (the default: path-aware commitment), "accept-depth" (the rule of
            arXiv 2608.02989), "natural", "evict" or "utility" (lossless), or any `RoutingPolicy`.
        num_nodes: Largest number of rows of a verification block, the root included.
        max_depth: Largest number of drafted tokens on one path.
        experts: None keeps Transformers' own computation of the experts; "acceptmoe" replaces it,
            prefill included, by kernels that read each expert of the union once. They are compiled
            at first use, need a C++ compiler on a CPU, and round differently: logits agree with the
            model's own within 1e-4 in fp32. On a CPU without arithmetic in the model's bfloat16 or
            float16, the dense layers of `generate` run on them too.
        compile: Compile the verification passes with `torch.compile`, and on a GPU capture them as
            CUDA graphs. Each size of pass compiles when it is first needed, half a minute on a CPU.
            A dense assistant on a CPU is compiled too, once for each capacity of its cache. True
            takes Inductor; a name takes that backend of `torch.compile`. The experts must
            trace: "grouped_mm" (Transformers' default), "batched_mm", or `experts="acceptmoe"`;
            with that the dense layers become kernels of ours too where a CPU's own are slow.
        audit: Share of verification blocks that are run under natural routing too, from the same
            cache, to measure what the policy changes: `report()["audit"]`. The text never depends
            on it. 0.02 costs one further pass in fifty.
        max_kl: Limit in nats per token on the running KL(natural || constrained) of the audited
            blocks; needs `audit`. Once the mean over the last 64 of them, and at least 16, is
            above it, the model routes naturally until `model.acceptmoe.resume_policy()`, warns
            with `KLLimitWarning` and says so in the report. Under a natural policy the KL is 0
            and the limit never acts.
        guard: Draft only while it pays, measured on the model's own steps, so that decoding is not
            meaningfully slower than without drafts however bad the drafter is. `report()` has the
            state, the reason and the rates. Steps without a draft route naturally.
        allow_table_mismatch: Let a policy that reads the commitment by depth run with a tree that
            its table was not made for.

    Raises:
        UnsupportedModelError: The model's family or configuration cannot be verified as a tree.
        TableError: The table is missing, damaged, or made for something else.
        DrafterError: The drafter does not fit the target.
        InvalidArgumentError: A number or name is out of range, or means nothing for this model.
        WrapStateError: The model is wrapped already.
        SelfCheckError: The routers could not be recomputed exactly.
        KernelBuildError: `experts` asks for kernels that cannot be compiled here.
    """
    if isinstance(model, AcceptMoEMixin):
        raise WrapStateError(
            "the model is wrapped already; call acceptmoe.unwrap(model) first to wrap it anew"
        )
    adapter = MoEAdapter(model)
    check_tree_limits(num_nodes, max_depth)
    check_experts_name(experts)
    check_audit(audit, max_kl)
    if not isinstance(guard, bool):
        raise InvalidArgumentError(f"guard is {guard!r}; it must be True or False")
    chosen_policy = load_policy(policy)
    chosen_policy.check_model(adapter.num_experts, adapter.experts_per_token)
    chosen_drafter = load_drafter(drafter)
    with turns_of(chosen_drafter).taken("wrap"):  # another model may be drafting with it
        chosen_drafter.check_target(model)
    chosen_table = _load_table(table, chosen_policy)
    if chosen_table is not None:
        chosen_table.check(
            target_fingerprint=config_fingerprint(model.config),
            target=type(model).__name__,
            drafter=chosen_drafter.name,
            num_nodes=num_nodes,
            max_depth=max_depth,
            needs_depths=chosen_policy.reads_depths,
            allow_mismatch=allow_table_mismatch,
        )
    passes = make_compiled_passes(
        model,
        adapter,
        chosen_policy,
        compile,
        num_nodes,
        max_depth,
        experts=experts,
        keeps_layers=audit > 0,
    )
    experts_patch = None if experts is None else ExpertsPatch(adapter)
    self_check(model, adapter)
    session = Session.attach(
        model, adapter, chosen_policy, chosen_table, chosen_drafter, num_nodes, max_depth, passes
    )
    session.use_experts(experts_patch, model.get_output_embeddings().weight)
    session.auditor = Auditor(audit, max_kl, [layer.name for layer in adapter.layers])
    session.guard = guard
    if isinstance(chosen_table, OnlineCommitmentTable):
        session.observers.append(chosen_table.observe)
    model.acceptmoe = session
    model.__class__ = _wrapped_class(type(model))
    return model


def unwrap(model: Model) -> Model:
    """`model` as it was before `wrap`: its class, hooks, attributes and outputs.

    Raises `WrapStateError` when it is not wrapped.
    """
    if not isinstance(model, AcceptMoEMixin):
        raise WrapStateError(
            f"this {type(model).__name__} is not wrapped; acceptmoe.wrap(model, table) does it"
        )
    with model.acceptmoe.exclusive("unwrap"):  # a running generate ends first
        model.acceptmoe.detach()
        model.__class__ = model._unwrapped_class
        del model.acceptmoe
    return cast(Model, model)


def check_tree_limits(num_nodes: int, max_depth: int) -> None:
    """Raise `InvalidArgumentError` unless both are whole numbers that make a tree."""
    for name, value in (("num_nodes", num_nodes), ("max_depth", max_depth)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NODES:
            raise InvalidArgumentError(
                f"{name} is {value!r}; it must be a whole number from 1 to {MAX_NODES}"
            )


def _load_table(
    table: CommitmentTable | str | os.PathLike[str] | None, policy: RoutingPolicy
) -> CommitmentTable | None:
    if isinstance(table, CommitmentTable):
        return table
    if isinstance(table, (str, os.PathLike)):
        return CommitmentTable.load(table)
    if table is not None:
        raise InvalidArgumentError(
            f"table is a {type(table).__name__}; it must be a CommitmentTable, a path, the name of "
            "a shipped table, or None"
        )
    if policy.reads_table:
        free = ", ".join(
            name for name, kind in POLICIES.items() if not (kind.reads_depths or kind.reads_paths)
        )
        raise TableError(
            f"policy {policy.name!r} reads a commitment table and table is None; make one with "
            f"'acceptmoe calibrate', or choose a policy that needs none ({free})"
        )
    return None


class AcceptMoEMixin:
    """The part of a wrapped model's class that replaces its ways of generating.

    It enters through the methods to which Transformers' `generate` hands over once it has prepared
    everything, so that all of its keywords keep their meaning.
    """

    acceptmoe: Session
    _unwrapped_class: type[Any]

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        streamer: BaseStreamer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Transformers' `generate`; keywords that do not go with draft trees are refused."""
        model, session = cast(PreTrainedModel, self), self.acceptmoe
        session.adapter.check_attention(model)  # it can be changed
        check_call(model, inputs, {**kwargs, "generation_config": generation_config})
        if streamer is not None:
            check_streamer(streamer)
            kwargs["streamer"] = HeldStreamer(streamer)
        with session.exclusive("generate"), session.drafting(model, "generate"):
            return super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, mode_kwargs: Any
    ) -> None:
        check_generation_config(generation_mode, generation_config, mode_kwargs)
        super()._validate_generation_mode(generation_mode, generation_config, mode_kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        model = cast(PreTrainedModel, self)
        keyword = self.acceptmoe.adapter.cache_keyword
        cache = model_kwargs.get(keyword)
        if cache is None:
            headroom = max_cache_length + self.acceptmoe.num_nodes
            model_kwargs[keyword] = make_cache(
                generation_config.cache_implementation,
                model.config,
                max(headroom, getattr(generation_config, "max_cache_len", None) or 0),
            )
            return
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        check_cache(cache)
        capacity = cache_capacity(cache)
        if capacity is not None and capacity < max_cache_length:
            raise UnsupportedGenerateError(
                f"the static cache has {capacity} slots and this call may need {max_cache_length}; "
                f"give it {max_cache_length + self.acceptmoe.num_nodes}, room for a draft tree "
                "included"
            )

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        model, session = cast(PreTrainedModel, self), self.acceptmoe
        check_batch(input_ids)
        keyword = session.adapter.cache_keyword
        cache = model_kwargs[keyword]
        # Read before the prefill: a chunked one takes both out of the keywords.
        attention_mask = model_kwargs.get("attention_mask")
        next_position = int(model_kwargs["position_ids"][0, -1]) + 1
        if attention_mask is not None:
            check_attention_mask(attention_mask, input_ids, num_cached_tokens(cache))
        if isinstance(streamer, HeldStreamer):
            streamer = streamer.release()
        returns_dict = generation_config.return_dict_in_generate
        emitter = TokenEmitter(
            input_ids,
            logits_processor,
            stopping_criteria,
            streamer,
            keeps_scores=bool(returns_dict and generation_config.output_scores),
            keeps_logits=bool(returns_dict and generation_config.output_logits),
        )
        start = time.perf_counter()
        with session.tap.recording(), session.linears():
            prefill = self._prefill(input_ids, generation_config, model_kwargs)  # type: ignore[attr-defined]
        session.statistics.num_prompts += 1
        session.statistics.prefill_s += time.perf_counter() - start
        num_cached = num_cached_tokens(cache)
        is_valid = torch.ones(num_cached, dtype=torch.bool, device=input_ids.device)
        if attention_mask is not None:
            is_valid = attention_mask[0, :num_cached].bool()
        prefix = Prefix(is_valid, next_position)
        max_length = stopping_criteria.max_length or input_ids.shape[1] + MAX_NODES
        with session.working_cache(model, cache, prefix, max_length) as working:
            decode(
                model,
                session,
                emitter,
                working,
                prefix,
                prefill.logits[:, -1],
                session.tap.features,
                max_length,
            )
        emitter.end()
        if not returns_dict:
            return emitter.input_ids
        return GenerateDecoderOnlyOutput(
            sequences=emitter.input_ids,
            scores=None if emitter.scores is None else tuple(emitter.scores),
            logits=None if emitter.logits is None else tuple(emitter.logits),
            **cast(Any, {keyword: cache}),
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copying and pickling by the importable base class; the wrapped one is made again."""
        parts = super().__reduce_ex__(protocol)
        return (_rebuild_wrapped, (self._unwrapped_class,), *parts[2:])


def _wrapped_class(base: type[Any]) -> type[Any]:
    """A class that answers to `base`'s name, so that what goes by the name keeps working."""
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_unwrapped_class": base,
    }
    return type(base.__name__, (AcceptMoEMixin, base), namespace)


def _rebuild_wrapped(base: type[Any]) -> Any:
    return copyreg.__newobj__(_wrapped_class(base))  # type: ignore[attr-defined]


def check_call(model: PreTrainedModel, inputs: Any, kwargs: dict[str, Any]) -> None:
    """Raise at the door for inputs and entry points that never reach tree decoding."""
    for name, reason in (
        ("inputs_embeds", "drafters need the prompt's tokens; pass input_ids"),
        (
            "custom_generate",
            "it would replace tree decoding; call acceptmoe.unwrap(model) first to use it",
        ),
    ):
        if kwargs.get(name) is not None:
            raise UnsupportedGenerateError(f"{name} was given; {reason}")
    if kwargs.get("cache_implementation") == "paged":
        raise UnsupportedGenerateError(
            "cache_implementation is 'paged', continuous batching, which takes no draft trees; use "
            "'dynamic' (the default) or 'static'"
        )
    given = kwargs.get("generation_config")
    if given is None:
        given = model.generation_config
    if not isinstance(given, GenerationConfig):
        raise InvalidArgumentError(
            f"generation_config is a {type(given).__name__}; it must be a GenerationConfig; single "
            "settings are keywords of generate"
        )
    for name, ordinary in (
        ("num_return_sequences", 1),
        ("penalty_alpha", 0),
        ("dola_layers", None),
    ):
        value = kwargs.get(name, getattr(given, name, None))
        if value is not None and value != ordinary:
            raise UnsupportedGenerateError(
                f"{name} is {value!r}; it must be {ordinary}, a wrapped model decodes one text "
                "greedily"
            )
    for name in ALL_CACHE_NAMES:
        value = kwargs.get(name)
        if value is not None and not isinstance(value, Cache):
            raise InvalidArgumentError(
                f"{name} is a {type(value).__name__}; it must be a Cache, for instance "
                "DynamicCache(), or be left out"
            )
    for name in ("max_new_tokens", "max_length"):
        value = kwargs.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise InvalidArgumentError(f"{name} is {value!r}; it must be a whole number from 1")
    mask = kwargs.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != 1):
        got = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidArgumentError(
            f"attention_mask is {got}; it must be a tensor [1, length], one number for every token"
        )
    check_prompt(model, inputs if inputs is not None else kwargs.get("input_ids"), kwargs)


def check_streamer(streamer: Any) -> None:
    """Raise `InvalidArgumentError` unless tokens can be put into `streamer`."""
    has_methods = all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
    if isinstance(streamer, type) or not has_methods:
        raise InvalidArgumentError(
            f"streamer is {streamer!r:.80}; it must be an object with the methods put and end, for "
            "instance TextStreamer(tokenizer)"
        )


def check_prompt(model: PreTrainedModel, input_ids: Any, kwargs: dict[str, Any]) -> None:
    """Raise `InvalidArgumentError` unless the prompt is one sequence of the model's tokens."""
    if input_ids is None:
        config = kwargs.get("generation_config") or model.generation_config
        if kwargs.get("bos_token_id", config.bos_token_id) is None:
            raise InvalidArgumentError(
                "the prompt is missing and the model has no BOS token to begin with; pass "
                "input_ids, an integer tensor [1, length]"
            )
        return
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise InvalidArgumentError(
            f"input_ids is {got}; it must be an integer tensor [1, length], as tokenizers give "
            "with return_tensors='pt'; their whole answer goes in as generate(**inputs)"
        )
    if input_ids.numel() == 0:
        raise InvalidArgumentError(
            "the prompt is empty; give at least one token, for instance the tokenizer's BOS"
        )
    check_batch(input_ids)
    lowest, highest = int(input_ids.min()), int(input_ids.max())
    vocab_size = num_token_ids(model)
    if lowest < 0 or highest >= vocab_size:
        raise InvalidArgumentError(
            f"the prompt has token {lowest if lowest < 0 else highest}; this model's tokens are 0 "
            f"to {vocab_size - 1}. Is the tokenizer the model's own?"
        )


def check_attention_mask(attention_mask: Tensor, input_ids: Tensor, num_cached: int) -> None:
    """Raise `InvalidArgumentError` unless the mask covers the whole text, cached tokens included.

    `input_ids` may be the whole text or only what comes after the cached tokens.
    """
    num_new = input_ids.shape[1]
    lengths = [num_cached + num_new]
    if num_new > num_cached:
        lengths.append(num_new)
    if attention_mask.shape[0] != 1 or attention_mask.shape[1] not in lengths:
        raise InvalidArgumentError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; with {num_new} input tokens "
            f"and {num_cached} in the cache it must be [1, {lengths[-1]}]"
        )


def check_batch(input_ids: Tensor) -> None:
    """Raise `UnsupportedGenerateError` unless there is one sequence."""
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise UnsupportedGenerateError(
            f"input_ids has shape {tuple(input_ids.shape)}; a wrapped model generates one sequence "
            "at a time, [1, length] (batches and num_return_sequences > 1 are not supported yet)"
        )


def check_generation_config(
    mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]
) -> None:
    """Raise `UnsupportedGenerateError` for every setting that tree decoding would not honour."""
    if mode_kwargs.get("assistant_model") is not None:
        raise UnsupportedGenerateError(
            "assistant_model was given to generate; give it to wrap: "
            "acceptmoe.wrap(model, table, drafter=assistant_model)"
        )
    if config.prompt_lookup_num_tokens is not None:
        raise UnsupportedGenerateError(
            "prompt_lookup_num_tokens was given; acceptmoe.wrap(model, table, drafter='ngram') is "
            "prompt lookup by trees"
        )
    if config.num_beams is not None and config.num_beams > 1:
        raise UnsupportedGenerateError(
            f"num_beams is {config.num_beams}; it must be 1, a wrapped model decodes greedily"
        )
    if config.do_sample:
        raise UnsupportedGenerateError(
            "do_sample is True; a wrapped model decodes greedily, pass do_sample=False "
            "(sampling is not supported yet)"
        )
    if mode != GenerationMode.GREEDY_SEARCH:
        raise UnsupportedGenerateError(
            f"these settings ask for {mode.value}; a wrapped model does greedy search only"
        )
    if config.use_cache is False:
        raise UnsupportedGenerateError(
            "use_cache is False; tree verification keeps the accepted path in the cache, "
            "leave it on"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise UnsupportedGenerateError(
                f"{name} is True; its rows would be those of draft trees. Run the model itself on "
                "the finished text for them"
            )
    if mode_kwargs.get("synced_gpus"):
        raise UnsupportedGenerateError(
            "synced_gpus is True; a wrapped model decodes in one process only"
        )
