"""The decode loop: draft, select and verify, accept, commit."""

from __future__ import annotations

from torch import Tensor
from transformers import Cache, PreTrainedModel

from acceptmoe.decoding.acceptance import accept_greedy
from acceptmoe.decoding.deferred import DeferredDrafter
from acceptmoe.decoding.emission import TokenEmitter
from acceptmoe.decoding.session import Session
from acceptmoe.decoding.steering import Steering
from acceptmoe.decoding.verify import Prefix, Verifier
from acceptmoe.errors import DrafterError
from acceptmoe.models.kv import cache_capacity, keep_path, rolled_back_on_error
from acceptmoe.policies.history import DecodingStep
from acceptmoe.tree import DraftTree, sibling_tokens_are_distinct


def decode(
    model: PreTrainedModel,
    session: Session,
    emitter: TokenEmitter,
    cache: Cache,
    prefix: Prefix,
    first_logits: Tensor,
    first_features: Tensor | None,
    max_length: int,
) -> None:
    """Emit tokens until a criterion says stop.

    The prompt is in `cache` already: `first_logits` [1, V] follow its last token, and
    `first_features` [P', F] are the target's states at its last P' tokens. Nothing is drafted that
    could only be emitted beyond `max_length` tokens.
    """
    drafter, statistics, clock = DeferredDrafter(session.drafter), session.statistics, session.clock
    steering, auditor = session.begin_text(), session.auditor
    verifier = Verifier(
        model,
        session.adapter,
        session.patch,
        session.tap,
        session.table,
        session.compiled,
        session.linears,
    )
    prompt = emitter.input_ids[0]
    emitter.begin_block(first_logits)
    root = emitter.next_token(0)
    is_finished = emitter.emit(root)
    statistics.num_tokens += 1
    if is_finished:
        return
    drafter.start(prompt, root, first_features)
    while not is_finished:
        start = clock()
        num_wanted = max_length - emitter.length
        size, max_depth = draft_limits(session, steering, num_wanted, cache, prefix)
        tree = steering.prune(draft(session, drafter, root, size, max_depth))
        drafted = clock()
        with rolled_back_on_error(cache, prefix.length):
            natural = auditor.natural_pass(verifier, tree, cache, prefix)
            audited = clock()
            is_natural = auditor.is_natural or not steering.is_warm
            block = verifier.verify(tree, cache, prefix, is_natural=is_natural)
            emitter.begin_block(block.logits, block.is_trusted)
            verified = clock()
            path = accept_greedy(tree, emitter.next_token, emitter.emit, emitter.is_trusted)
        keep_path(cache, prefix.length, path.nodes)
        prefix = prefix.extended(len(path.nodes))
        root, is_finished = path.tokens[-1], path.is_finished
        if not is_finished:
            features = None if block.features is None else block.features[list(path.nodes)]
            drafter.extend(list(path.tokens), features)
        for observe in session.observers:
            observe(tree, path.nodes)
        statistics.count_block(tree.num_nodes, len(path.tokens))
        statistics.num_cut_paths += path.is_cut
        committed = clock()
        auditor.after_block(tree, block, path.nodes, natural)
        statistics.audit_s += audited - drafted + clock() - committed
        step = DecodingStep(
            size=size,
            num_nodes=tree.num_nodes,
            num_tokens=len(path.tokens),
            draft_s=drafted - start,
            pass_s=committed - audited,
            is_cut_short=is_finished or max_depth < session.max_depth,
        )
        steering.record(step)
        statistics.draft_s += step.draft_s
        statistics.verify_s += verified - audited
        statistics.commit_s += committed - verified


def draft_limits(
    session: Session, steering: Steering, num_wanted: int, cache: Cache, prefix: Prefix
) -> tuple[int, int]:
    """Nodes and depth of the next draft: no more than pays, can be emitted, and the cache holds."""
    max_depth = min(session.max_depth, num_wanted - 1)
    num_nodes = steering.num_nodes()
    capacity = cache_capacity(cache)
    if capacity is not None:
        num_nodes = min(num_nodes, capacity - prefix.length)
    return (num_nodes, max_depth) if num_nodes > 1 and max_depth >= 1 else (1, max_depth)


def draft(
    session: Session, drafter: DeferredDrafter, root: int, num_nodes: int, max_depth: int
) -> DraftTree:
    """The drafter's proposal; the root alone where there is nothing to ask for."""
    if num_nodes == 1:
        return DraftTree.root_only(root)
    tree = drafter.propose(num_nodes, max_depth)
    check_proposal(session, tree, root, num_nodes, max_depth)
    return tree


def check_proposal(
    session: Session, tree: DraftTree, root: int, num_nodes: int, max_depth: int
) -> None:
    """Raise `DrafterError` when a drafter breaks its promise; anybody can write one."""
    drafter, num_token_ids = session.drafter, session.adapter.num_token_ids
    if not isinstance(tree, DraftTree):
        raise DrafterError(
            f"the drafter {drafter.name!r} proposed a {type(tree).__name__}; it must be a "
            "DraftTree, DraftTree.root_only(token) where it has no idea"
        )
    if tree.tokens[0] != root:
        raise DrafterError(
            f"the drafter {drafter.name!r} proposed a tree with root {tree.tokens[0]}; "
            f"the last committed token is {root}"
        )
    if tree.num_nodes > num_nodes or tree.shape.max_depth > max_depth:
        raise DrafterError(
            f"the drafter {drafter.name!r} proposed {tree.num_nodes} nodes of depth "
            f"{tree.shape.max_depth}; it was asked for at most {num_nodes} of depth {max_depth}"
        )
    if max(tree.tokens) >= num_token_ids:
        raise DrafterError(
            f"the drafter {drafter.name!r} proposed token {max(tree.tokens)}; the target's tokens "
            f"are 0 to {num_token_ids - 1}"
        )
    if not sibling_tokens_are_distinct(tree):
        raise DrafterError(
            f"the drafter {drafter.name!r} proposed the same token twice after one node; "
            "only the first could ever be accepted"
        )
