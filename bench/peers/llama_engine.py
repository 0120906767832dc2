"""Greedy decoding and passes of many rows by llama.cpp, through its C interface.

The classes of llama-cpp-python need a tokenizer and copy logits; these calls need neither.
Axes: T rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np


class LlamaError(RuntimeError):
    """llama.cpp refused a file or a batch."""


class LlamaEngine:
    """One model and one sequence; a context manager that frees both."""

    def __init__(self, path: Path, num_threads: int, num_slots: int) -> None:
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)  # kept alive by this reference
        llama_cpp.llama_log_set(self._quiet, None)
        self._model: Any = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise LlamaError(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = num_slots
        settings.n_threads = settings.n_threads_batch = num_threads
        self._context: Any = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise LlamaError(f"llama.cpp cannot make a context of {num_slots} tokens")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size: int = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._num_slots = num_slots
        self._batch: Any = llama_cpp.llama_batch_init(num_slots, 0, 1)

    def __enter__(self) -> LlamaEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, end_ids: Collection[int]
    ) -> tuple[list[int], float]:
        """The new tokens, an end included, and the seconds from the first to the last of them."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._decode(prompt, first=0, wants_all=False)
        tokens = [self._likeliest(len(prompt) - 1)]
        start = time.perf_counter()
        while tokens[-1] not in end_ids and len(tokens) < max_new_tokens:
            self._decode(tokens[-1:], first=len(prompt) + len(tokens) - 1, wants_all=False)
            tokens.append(self._likeliest(0))
        return tokens, time.perf_counter() - start

    def time_pass(self, prefix: Sequence[int], rows: Sequence[int], repeats: int) -> list[float]:
        """Seconds of each pass over `rows`, the tokens that follow `prefix`, with all logits.

        The rows are a chain: what a pass costs does not depend on who sees whom.
        """
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)
        self._decode(prefix, first=0, wants_all=False)
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            self._decode(rows, first=len(prefix), wants_all=True)
            times.append(time.perf_counter() - start)
            llama_cpp.llama_memory_seq_rm(memory, 0, len(prefix), -1)
        return times[1:]  # the first one builds the graph for this number of rows

    def _decode(self, tokens: Sequence[int], *, first: int, wants_all: bool) -> None:
        """Run `tokens` at positions from `first` on; logits of the last one, or of all."""
        if first + len(tokens) > self._num_slots:
            raise LlamaError(f"the text is longer than the {self._num_slots} tokens of the context")
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row] = token
            batch.pos[row] = first + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = wants_all or row == len(tokens) - 1
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise LlamaError(f"llama_decode of {len(tokens)} tokens returned {status}")
        # Passes run asynchronously; reading logits would wait for them too.
        llama_cpp.llama_synchronize(self._context)

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())
