"""The training loop shared by the base model and the adapters."""

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from demo.samples import Sample

CHUNK = 8192


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    rate: float
    batch_tokens: int
    warmup: int = 100
    weight_decay: float = 0.05


def batches(samples: list[Sample], budget: int, seed: int) -> list[list[Sample]]:
    """Group samples of like length, so that hardly any padding is computed.

    Sorting only inside chunks keeps the order of the data random over the run.
    """
    rng = random.Random(seed)
    grouped: list[list[Sample]] = []
    for start in range(0, len(samples), CHUNK):
        chunk = sorted(samples[start : start + CHUNK], key=lambda sample: len(sample.ids))
        group: list[list[Sample]] = []
        batch: list[Sample] = []
        for sample in chunk:
            if batch and len(sample.ids) * (len(batch) + 1) > budget:
                group.append(batch)
                batch = []
            batch.append(sample)
        group.append(batch)
        rng.shuffle(group)
        grouped += group
    return grouped


def tensors(batch: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right (causal attention never looks there) and mark what to learn."""
    width = max(len(sample.ids) for sample in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), -100)
    for row, sample in enumerate(batch):
        size = len(sample.ids)
        ids[row, :size] = torch.tensor(sample.ids)
        learn = torch.tensor(sample.learn)
        labels[row, :size] = torch.where(learn, ids[row, :size], -100)
    return ids, labels


def answer_loss(
    body: nn.Module, head: nn.Module, ids: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Cross entropy of the learned tokens; the vocabulary is scored only where it counts."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = labels[:, 1:]
        keep = wanted != -100
        scores = head(hidden[keep])
    return nn.functional.cross_entropy(scores.float(), wanted[keep])


def rate_at(step: int, steps: int, schedule: Schedule) -> float:
    """Linear warm-up, then a cosine down to almost nothing."""
    if step < schedule.warmup:
        return schedule.rate * (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(1, steps - schedule.warmup)
    return schedule.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    body: nn.Module, head: nn.Module, samples: list[Sample], schedule: Schedule, seed: int
) -> Iterator[str]:
    """Train all parameters that ask for gradients, yielding a line of progress now and then."""
    parameters = [p for p in body.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=schedule.rate, betas=(0.9, 0.98),
        weight_decay=schedule.weight_decay, fused=True,
    )  # fmt: skip
    plan = batches(samples, schedule.batch_tokens, seed)
    started, total = time.monotonic(), 0.0
    for step, batch in enumerate(plan):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, len(plan), schedule)
        loss = answer_loss(body, head, *tensors(batch))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % 50 == 0:
            spent = time.monotonic() - started
            yield f"step {step + 1}/{len(plan)} loss {total / 50:.4f} {spent:.0f}s"
            total = 0.0
