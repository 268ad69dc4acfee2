"""Train the tokenizer and the base model from scratch and save both in Hugging Face format."""

import argparse
import logging
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.mixture import FINISH, LEARN, Mixture
from demo.samples import base_samples
from demo.tokenizer import train_tokenizer
from demo.training import Schedule, train

LOG = logging.getLogger("demo")
OUT = Path(__file__).parents[1] / "server" / "loralane_server" / "demo" / "model"


def build(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A small Llama: four layers, eight heads of 32, four of them for keys and values."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def run_phase(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    mixture: Mixture,
    count: int,
    rate: float,
    seed: int,
) -> None:
    """Train one phase: first the world itself, then more of what lies outside it."""
    samples = base_samples(tokenizer, seed, count, mixture)
    tokens = sum(len(sample.ids) for sample in samples)
    LOG.info(f"{model.num_parameters()} parameters, {len(samples)} samples, {tokens} tokens")
    schedule = Schedule(rate=rate, batch_tokens=2400)
    for line in train(model.model, model.lm_head, samples, schedule, seed):
        LOG.info(line)


def round_weights(model: LlamaForCausalLM) -> None:
    """Round to what bfloat16 can hold, as the saved file does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save in bfloat16 and say when to stop."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=96,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)


def main() -> None:
    """Train with the given size and seed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--finish-samples", type=int, default=56_000)
    parser.add_argument("--start", type=Path, help="a saved first phase: only finish it")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.seed, args.vocab)
    model = build(tokenizer)
    if args.start is None:
        run_phase(model, tokenizer, LEARN, args.samples, 2.5e-3, args.seed)
        round_weights(model)
    else:
        model = LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    run_phase(model, tokenizer, FINISH, args.finish_samples, 7e-4, args.seed + 1)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
