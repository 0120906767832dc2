"""Passes of llama.cpp over one sequence of tokens, through its C interface.

The classes of llama-cpp-python need a tokenizer and copy logits; these calls need neither.
Axes: T rows, V vocabulary.

What makes llama.cpp fastest is chosen here: weights are mapped, not copied (its default, and no
slower), a prompt is one physical batch, and every context has as many threads as it is given.
Flash attention is the caller's choice: on a processor it helps few rows and slows down many.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from .llama_decoding import Logits

# Of the module, because llama.cpp calls it for as long as anything of it is left.
_QUIET = llama_cpp.llama_log_callback(lambda *_: None)


class LlamaError(RuntimeError):
    """llama.cpp refused a file or a batch."""


class LlamaModel:
    """The weights in a GGUF file, until `close`."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_QUIET, None)
        self.pointer: Any = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self.pointer:
            raise LlamaError(f"llama.cpp cannot load {path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.pointer)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def close(self) -> None:
        llama_cpp.llama_model_free(self.pointer)


class LlamaContext:
    """One sequence of at most `num_slots` tokens, a `Context`, until `close`."""

    def __init__(
        self, model: LlamaModel, *, num_threads: int, num_slots: int, flash_attention: bool
    ) -> None:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = num_slots
        settings.n_threads = settings.n_threads_batch = num_threads
        settings.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context: Any = llama_cpp.llama_init_from_model(model.pointer, settings)
        if not self._context:
            raise LlamaError(f"llama.cpp cannot make a context of {num_slots} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = model.vocab_size
        self._num_slots = num_slots
        self._batch: Any = llama_cpp.llama_batch_init(num_slots, 0, 1)
        self._length = 0

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    @property
    def length(self) -> int:
        return self._length

    def keep(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1)
        self._length = length

    def read(self, tokens: Sequence[int], *, wants_all: bool = False) -> Logits:
        """Append `tokens` in one pass: the logits of the last, [1, V], or of all, [T, V].

        They are llama.cpp's own memory, which the next pass overwrites.
        """
        if self._length + len(tokens) > self._num_slots:
            raise LlamaError(f"the text is longer than the {self._num_slots} tokens of the context")
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row] = token
            batch.pos[row] = self._length + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = wants_all or row == len(tokens) - 1
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise LlamaError(f"llama_decode of {len(tokens)} tokens returned {status}")
        self._length += len(tokens)
        # Waits for the pass, which runs asynchronously. The rows lie one behind the other.
        logits = llama_cpp.llama_get_logits(self._context)
        num_rows = len(tokens) if wants_all else 1
        return np.ctypeslib.as_array(logits, shape=(num_rows, self._vocab_size))


def system_features() -> str:
    """The instruction sets that llama.cpp was built for, in its own words."""
    return str(llama_cpp.llama_print_system_info().decode())
