"""Train the byte-pair tokenizer that the bundled targets share, from training prompts only.

PYTHONPATH=src python bench/build_tokenizer.py --out checkpoints/tokenizer
"""

import argparse
from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from acceptmoe.targets.tasks import TASKS, problem_stream

EOS, PAD, BOS = "<|end|>", "<|pad|>", "<|begin|>"


def training_texts(per_task: int, seed: int) -> Iterator[str]:
    for task in TASKS:
        for problem in islice(problem_stream(task, "train", seed), per_task):
            yield problem.prompt
            yield problem.solution


def build(vocab_size: int, per_task: int, seed: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone, so that arithmetic sees one token for each; bytes cover any other text.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD, BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(per_task, seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        bos_token=BOS,
        model_max_length=1024,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--vocab-size", type=int, default=1536)
    parser.add_argument("--per-task", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = build(arguments.vocab_size, arguments.per_task, arguments.seed)
    tokenizer.save_pretrained(arguments.out)
    print(f"{len(tokenizer)} tokens in {arguments.out}")


if __name__ == "__main__":
    main()
