"""Tiny random checkpoints as Hugging Face folders, written by transformers: weights, tokenizer, chat template."""

import json
from pathlib import Path
from typing import Any

SPECIAL = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ["the cat sat on the mat", "what is the capital of France", "naïve café 你好 🤖", "a,b,c stop here"] * 4
SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.5,
)


def tokenizer() -> Any:
    """A byte-level BPE with the special tokens last; every byte has a token, so every text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens(list(SPECIAL))
    return made


def folder(
    path: Path, family: str = "llama", *, seed: int = 0, chat: bool = True, text: bool = True, eos: Any = "<|end|>",
    generation: dict[str, Any] | None = None, **sizes: Any,
) -> Path:
    """Write a checkpoint of "llama" or "qwen3" into `path` and return it.

    eos: text of the token that ends an answer, or None.  text=False leaves the tokenizer out, chat=False the template.
    sizes: settings of config.json that differ from SIZES.
    """
    import torch
    import transformers

    bpe = tokenizer()
    ids = {t: bpe.token_to_id(t) for t in SPECIAL}
    kinds = {"llama": "Llama", "qwen3": "Qwen3"}
    config = getattr(transformers, f"{kinds[family]}Config")(**{
        "vocab_size": bpe.get_vocab_size(), "bos_token_id": ids["<|bos|>"], "eos_token_id": ids.get(eos),
        **SIZES, **sizes,
    })
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kinds[family]}ForCausalLM")(config).eval()
    model.save_pretrained(path)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if text:
        bpe.save(str(path / "tokenizer.json"))
        named = {"bos_token": "<|bos|>", **({"eos_token": eos} if eos is not None else {})}
        (path / "tokenizer_config.json").write_text(json.dumps({**named, "tokenizer_class": "PreTrainedTokenizerFast"}))
        if chat:
            (path / "chat_template.jinja").write_text(TEMPLATE)
    return path
