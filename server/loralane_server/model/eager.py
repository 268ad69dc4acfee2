"""Steps run as they come: the decoder's operations one after another, in shapes of any size."""

from dataclasses import dataclass
from typing import Generic

from loralane_server.device.seam import BatchT, EagerDevice, GraphCount, StepInput, StepOutput
from loralane_server.model.decoder import Decoder, Flow


class EagerRunner(Generic[BatchT]):
    """Implements `StepRunner` for a device that computes what it is told at once."""

    def __init__(self, decoder: Decoder[BatchT], device: EagerDevice[BatchT]) -> None:
        self._decoder = decoder
        self._device = device

    @property
    def depth(self) -> int:
        """See `StepRunner.depth`: the host computes, so there is nothing to overlap."""
        return 1

    @property
    def parts(self) -> int:
        """See `StepRunner.parts`."""
        return self._decoder.layers

    @property
    def graphs(self) -> GraphCount:
        """See `StepRunner.graphs`."""
        return GraphCount()

    def submit(self, step: StepInput) -> "EagerStep":
        """See `StepRunner.submit`: it is computed when this returns."""
        batch = self._device.batch(step)
        return EagerStep(self._device.sample(self._decoder.logits(batch), batch))

    def begin(self, step: StepInput) -> "EagerParts[BatchT]":
        """See `StepRunner.begin`."""
        return EagerParts(self._decoder, self._device, step)


@dataclass(frozen=True, slots=True, eq=False)
class EagerStep:
    """Implements `SubmittedStep`: what was chosen."""

    output: StepOutput

    def fetch(self) -> StepOutput:
        """See `SubmittedStep.fetch`."""
        return self.output


@dataclass(slots=True, eq=False)
class EagerParts(Generic[BatchT]):
    """Implements `StepInParts`: how far one step has come."""

    decoder: Decoder[BatchT]
    device: EagerDevice[BatchT]
    step: StepInput
    #: What the next layer takes; None before the first.
    flow: Flow | None = None
    #: Layers done.
    computed: int = 0

    def run(self, count: int) -> StepOutput | None:
        """See `StepInParts.run`.

        The batch is laid out again each time: the device may look at what the lanes hold by now.
        """
        decoder, device = self.decoder, self.device
        batch = device.batch(self.step)
        flow = decoder.begin(batch) if self.flow is None else self.flow
        last = min(self.computed + count, decoder.layers)
        self.flow = decoder.advance(flow, self.computed, last, batch)
        self.computed += count
        if self.computed <= decoder.layers:
            return None
        return device.sample(decoder.finish(self.flow, batch), batch)
