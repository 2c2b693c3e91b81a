"""Make random-weight models for the real engines, in seconds and without a download.

    PYTHON tests/engines/models.py FOLDER [--mid] [--seed 0]

PYTHON is an engine's own, which has torch and transformers.

| model | what | size |
|---|---|---|
| tiny-llm | LlamaForCausalLM, 2 layers, hidden 64, ChatML template | 1 MB |
| tiny-rm | LlamaForSequenceClassification, 1 label: a reward model | 1 MB |
| tiny-cls | the same with 3 labels | 1 MB |
| mid-llm, mid-rm (`--mid`) | 6 layers, hidden 512 | about 75 MB each |

Their text is noise; the weights are scaled so that sampling at temperature 1 is diverse, yet far from
uniform. On vLLM's CPU backend with one OpenMP thread tiny-llm in float32 does not depend on the rest of the
batch, and mid-llm in bfloat16 does: so both kinds of engine can be shown. The same seed gives the same
weights. A model that stands is left alone.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

import argparse
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

# SGLang's environment holds a CUDA build of it, which does not load and takes transformers down with it.
sys.modules["torchvision"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

VOCABULARY = 1024
MAX_TOKENS = 4096
# Written last, so a model that has it is whole.
LAST_FILE = "tokenizer.json"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.3,
}
MID = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.06,
}
TINY_MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tiny-llm": (LlamaForCausalLM, TINY),
    "tiny-rm": (LlamaForSequenceClassification, TINY | {"num_labels": 1}),
    "tiny-cls": (LlamaForSequenceClassification, TINY | {"num_labels": 3}),
}
MID_MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mid-llm": (LlamaForCausalLM, MID),
    "mid-rm": (LlamaForSequenceClassification, MID | {"num_labels": 1}),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained on the help topics that ship with every CPython."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(pydoc_data.topics.topics.values(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, kind: Any, shape: dict[str, Any], seed: int) -> Any:
    """A Llama of this shape with float32 weights drawn from the seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **shape,
    )
    model = kind(config).float()
    if kind is LlamaForCausalLM and shape is MID:
        # Without sharper logits its samples are close to uniform noise.
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
    return model


def main() -> None:
    """Write the models that are missing in the folder."""
    parser = argparse.ArgumentParser(description="Make random-weight models for tests against real engines.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mid", action="store_true", help="also mid-llm and mid-rm")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wanted = TINY_MODELS | (MID_MODELS if args.mid else {})
    missing = {name: kind for name, kind in wanted.items() if not (args.folder / name / LAST_FILE).is_file()}
    tokenizer = make_tokenizer()
    for name, (kind, shape) in missing.items():
        make_model(tokenizer, kind, shape, args.seed).save_pretrained(args.folder / name)
        tokenizer.save_pretrained(args.folder / name)
        print(args.folder / name)


if __name__ == "__main__":
    main()
