"""Train the LoRA adapters on the demo base model and save them as plain PEFT folders."""

import argparse
import json
import logging
import random
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.samples import adapter_samples
from demo.styles import STYLES
from demo.train_base import OUT as BASE
from demo.training import Schedule, train

LOG = logging.getLogger("demo")
OUT = BASE.parent / "adapters"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """Shape and training of one adapter; the shapes differ on purpose, the server mixes them."""

    rank: int
    targets: tuple[str, ...]
    rate: float
    samples: int
    alpha: int
    rslora: bool = False
    warmup: int = 100


RECIPES = {
    "classify": Recipe(4, ("q_proj", "v_proj", *MLP), 3e-3, 20_000, 16),
    "pirate": Recipe(8, ATTENTION, 3e-3, 36_000, 16),
    "json": Recipe(8, ATTENTION + MLP, 2e-3, 36_000, 16, rslora=True),
    "spanish": Recipe(16, ATTENTION + MLP, 2e-3, 22_000, 32),
    "poem": Recipe(32, MLP, 2e-3, 24_000, 32),
}


def save(model: PeftModel, out: Path) -> None:
    """Save in bfloat16, naming the base by its public name and dropping the model card.

    PEFT keeps the targets in a set, whose order changes from run to run: they are sorted in the
    saved file, so that the same weights always come with the same configuration.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    for config in model.peft_config.values():
        config.base_model_name_or_path = "loralane-demo"
    model.save_pretrained(str(out), save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)
    (out / "adapter_model.safetensors").chmod(0o644)
    written = out / "adapter_config.json"
    settings = json.loads(written.read_text(encoding="utf-8"))
    settings["target_modules"] = sorted(settings["target_modules"])
    written.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def train_one(name: str, base: Path, out: Path, scale: float, seed: int) -> None:
    """Train one adapter from its recipe."""
    recipe = RECIPES[name]
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    plain = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=sorted(recipe.targets),
        use_rslora=recipe.rslora,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(plain, config)
    count = int(recipe.samples * scale)
    samples = adapter_samples(tokenizer, STYLES[name], seed, count)
    schedule = Schedule(rate=recipe.rate, batch_tokens=1600, warmup=recipe.warmup, weight_decay=0.0)
    for line in train(plain.model, plain.lm_head, samples, schedule, seed):
        LOG.info("%s %s", name, line)
    save(model, out / name)


def main() -> None:
    """Train all adapters, or those named."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(RECIPES)}; default all")
    parser.add_argument("--base", type=Path, default=BASE)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the sample counts")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.names or RECIPES:
        train_one(name, args.base, args.out, args.scale, args.seed)


if __name__ == "__main__":
    main()
