"""Sequences of one length, packed of samples of any length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from infinity_tools.samples.encode import Sample

IGNORED = -100
"""The label of a token that is not trained, as torch's loss has it."""

_OPEN = 64
"""Sequences that wait for a sample that fits: enough to leave few per cent empty, and a bound on memory."""


@dataclass
class Packed:
    """A sequence: one or several samples side by side."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    """The tokens, `IGNORED` where one is not trained."""
    lengths: list[int] = field(default_factory=list)
    """Of the samples in it, in order."""

    def add(self, sample: Sample, *, apart: bool) -> None:
        """Put a sample behind what is there; `apart`: its first token is not to be told from what is before it."""
        labels = [token if trained else IGNORED for token, trained in zip(sample.tokens, sample.trained, strict=True)]
        if apart:
            labels[0] = IGNORED
        self.tokens += sample.tokens
        self.labels += labels
        self.lengths.append(len(sample.tokens))

    @property
    def learns(self) -> bool:
        """Whether any label counts; the first one does not, nothing being before it."""
        return any(label != IGNORED for label in self.labels[1:])

    def filled(self, length: int, padding: int) -> Packed:
        """Return the sequence with so many tokens: the rest is padding, a sample of its own that nobody learns."""
        missing = length - len(self.tokens)
        if not missing:
            return self
        return Packed(
            [*self.tokens, *[padding] * missing], [*self.labels, *[IGNORED] * missing], [*self.lengths, missing]
        )


class Packer:
    """Makes sequences of samples; memory is that of some sequences."""

    def __init__(self, length: int, padding: int, *, one_row: bool, packs: bool = True) -> None:
        """Begin with nothing.

        Args:
            length: tokens of a sequence.
            padding: the token that fills what is empty.
            one_row: samples follow each other in one long row that is cut into sequences. Otherwise a sample is whole
                in one sequence, with others if they fit, and what is longer than a sequence is cut off.
            packs: whether a sequence has several whole samples; else it has one, and padding.
        """
        self._length, self._padding, self._one_row, self._packs = length, padding, one_row, packs
        self._open: list[Packed] = []
        self.samples = 0  # that were added
        self.cut = 0  # samples of which the end was cut off
        self.dropped = 0  # of those, what was left is nothing to train on

    def add(self, sample: Sample) -> Iterator[Packed]:
        """Add a sample; return the sequences that are full."""
        self.samples += 1
        yield from self._cut_row(sample) if self._one_row else self._fit(sample)

    def end(self) -> Iterator[Packed]:
        """Return what is not full yet, with padding."""
        for packed in self._open:
            if packed.learns:
                yield packed.filled(self._length, self._padding)
        self._open = []

    def _cut_row(self, sample: Sample) -> Iterator[Packed]:
        first = 0
        while first < len(sample.tokens):
            if not self._open:
                self._open = [Packed()]
            last = first + self._length - len(self._open[0].tokens)
            self._open[0].add(Sample(sample.tokens[first:last], sample.trained[first:last]), apart=False)
            first = last
            if len(self._open[0].tokens) == self._length:
                yield self._open.pop()

    def _fit(self, sample: Sample) -> Iterator[Packed]:
        if len(sample.tokens) > self._length:
            self.cut += 1
            sample = Sample(sample.tokens[: self._length], sample.trained[: self._length])
        if not any(sample.trained[1:]):
            self.dropped += 1
            return
        if not self._packs:
            alone = Packed()
            alone.add(sample, apart=True)
            yield alone.filled(self._length, self._padding)
            return
        fitting = [one for one in self._open if len(one.tokens) + len(sample.tokens) <= self._length]
        if fitting:
            best = max(fitting, key=lambda one: len(one.tokens))
        else:
            best = Packed()
            self._open.append(best)
        best.add(sample, apart=True)
        if len(best.tokens) == self._length or len(self._open) > _OPEN:
            # Not `remove`, which compares: two may be equal.
            fullest = max(range(len(self._open)), key=lambda place: len(self._open[place].tokens))
            yield self._open.pop(fullest).filled(self._length, self._padding)
