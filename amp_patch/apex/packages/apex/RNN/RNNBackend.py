"""Runs cells over sequences, in layers and directions; knows no particular cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class RNNCell(nn.Module):
    """The parameters and the states of one layer.

    The states live on between calls, with their graph: call `detach_hidden` or `reset_hidden`
    between two training steps.

    Args:
        gate_multiplier: rows of the weights for each hidden feature.
        input_size, hidden_size: features.
        cell: takes the input, the states (a single one alone), the weights and the biases, and
            returns the next states.
        n_hidden_states: how many states, the output first.
        bias: whether there are biases.
        output_size: features of the output, to which ``w_ho`` projects it; None for hidden_size.

    Attributes:
        hidden: the states, shapes (batch, output_size) and (batch, hidden_size); None at first.
    """

    def __init__(
        self,
        gate_multiplier: int,
        input_size: int,
        hidden_size: int,
        cell: Callable[..., Any],
        n_hidden_states: int = 2,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__()
        self.gate_multiplier = gate_multiplier
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.cell = cell
        self.n_hidden_states = n_hidden_states
        self.bias = bias
        self.output_size = hidden_size if output_size is None else output_size
        self.gate_size = gate_multiplier * hidden_size
        self.w_ih = nn.Parameter(torch.empty(self.gate_size, input_size))
        self.w_hh = nn.Parameter(torch.empty(self.gate_size, self.output_size))
        if self.output_size != hidden_size:
            self.w_ho = nn.Parameter(torch.empty(self.output_size, hidden_size))
        for name in ("b_ih", "b_hh"):
            self.register_parameter(
                name, nn.Parameter(torch.empty(self.gate_size)) if bias else None
            )
        self.hidden: list[Tensor | None] = [None] * n_hidden_states
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> RNNCell:
        """Return a new cell of the same sizes, but for the input's where one is given."""
        return type(self)(
            self.gate_multiplier,
            self.input_size if new_input_size is None else new_input_size,
            self.hidden_size,
            self.cell,
            self.n_hidden_states,
            self.bias,
            self.output_size,
        )

    def reset_parameters(self, gain: float = 1) -> None:
        """Draw all parameters from uniform(-gain / sqrt(hidden), gain / sqrt(hidden))."""
        bound = gain * self.hidden_size**-0.5
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def init_hidden(self, bsz: int) -> None:
        """Set to 0 the states that there are not, or not for this batch size and device."""
        sizes = [self.output_size, *[self.hidden_size] * (self.n_hidden_states - 1)]
        for index, size in enumerate(sizes):
            state = self.hidden[index]
            if state is None or state.shape[0] != bsz or state.device != self.w_ih.device:
                self.hidden[index] = self.w_ih.detach().new_zeros(bsz, size)

    def reset_hidden(self, bsz: int) -> None:
        """Set the states to 0, for a batch size."""
        self.hidden = [None] * self.n_hidden_states
        self.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Cut the states off from the graph that made them.

        Raises:
            RuntimeError: there are no states yet.
        """
        if any(state is None for state in self.hidden):
            raise RuntimeError(
                "detach_hidden() needs states; got none yet. Call init_hidden(batch_size), or "
                "run the network first."
            )
        self.hidden = [state.detach() for state in self.hidden if state is not None]

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Take one step: input of shape (batch, input_size) to the new states."""
        self.init_hidden(input.shape[0])
        # Those of a step under amp may be half where this one is not.
        states = [state.to(input.dtype) for state in self.hidden if state is not None]
        given: Any = states if self.n_hidden_states > 1 else states[0]
        new = self.cell(input, given, *self._matrices(), b_ih=self.b_ih, b_hh=self.b_hh)
        hidden = list(new) if self.n_hidden_states > 1 else [new]
        if self.output_size != self.hidden_size:
            hidden[0] = functional.linear(hidden[0], self.w_ho)
        self.hidden = hidden
        return tuple(hidden)

    def _matrices(self) -> list[Tensor]:
        return [self.w_ih, self.w_hh]


class _Parts(nn.Module):
    """Hands on to all parts what concerns parameters and states."""

    rnns: Any  # an nn.ModuleList: mypy takes what is in one for a tensor

    def reset_parameters(self) -> None:
        """Call `RNNCell.reset_parameters` of every cell."""
        for part in self.rnns:
            part.reset_parameters()

    def init_hidden(self, bsz: int) -> None:
        """Call `RNNCell.init_hidden` of every cell."""
        for part in self.rnns:
            part.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Call `RNNCell.detach_hidden` of every cell."""
        for part in self.rnns:
            part.detach_hidden()

    def reset_hidden(self, bsz: int) -> None:
        """Call `RNNCell.reset_hidden` of every cell."""
        for part in self.rnns:
            part.reset_hidden(bsz)


class stackedRNN(_Parts):
    """Layers of cells over a sequence.

    Args:
        inputRNN: the first layer's cell, or all layers' cells.
        num_layers: how many.
        dropout: share of each layer's outputs that is dropped in training, but the last's.
        batch_first: whether inputs and outputs have the batch before the sequence.

    Attributes:
        rnns: the cells.

    Raises:
        ValueError: there are not num_layers cells.
    """

    def __init__(
        self,
        inputRNN: RNNCell | Sequence[RNNCell],
        num_layers: int = 1,
        dropout: float = 0,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(inputRNN, RNNCell):
            others = [inputRNN.new_like(inputRNN.output_size) for _ in range(num_layers - 1)]
            inputRNN = [inputRNN, *others]
        if len(inputRNN) != num_layers:
            raise ValueError(
                f"num_layers must be the number of cells; got {num_layers} and {len(inputRNN)} "
                "cells. Call stackedRNN(cells, num_layers=len(cells))."
            )
        self.nLayers = num_layers
        self.dropout = dropout
        self.batch_first = batch_first
        self.rnns = nn.ModuleList(inputRNN)

    def forward(
        self, input: Tensor, collect_hidden: bool = False, reverse: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Run a sequence.

        Args:
            input: shape (sequence, batch, features).
            collect_hidden: whether to return the states of every step, not of the last one alone.
            reverse: whether to begin at the end.

        Returns:
            The last layer's outputs, (sequence, batch, output_size), and every kind of state:
            (layer, batch, size), or all collected, (sequence, layer, batch, size).
        """
        steps = list((input.transpose(0, 1) if self.batch_first else input).unbind())
        steps = steps[::-1] if reverse else steps
        layers: list[list[tuple[Tensor, ...]]] = []
        for index, cell in enumerate(self.rnns):
            if index and self.dropout:
                steps = [functional.dropout(step, self.dropout, self.training) for step in steps]
            states = [cell(step) for step in steps]
            steps = [state[0] for state in states]
            layers.append(states if collect_hidden else states[-1:])
        layers = [states[::-1] for states in layers] if reverse else layers
        output = torch.stack(steps[::-1] if reverse else steps)
        kinds = range(len(layers[0][0]))
        collected = [
            torch.stack([torch.stack([one[kind] for one in states]) for states in layers], 1)
            for kind in kinds
        ]
        hidden = collected if collect_hidden else [states[0] for states in collected]
        return output.transpose(0, 1) if self.batch_first else output, hidden


class bidirectionalRNN(_Parts):
    """Two `stackedRNN` in opposite directions; arguments as there.

    Attributes:
        fwd, bckwrd: one and the other.
    """

    def __init__(
        self, inputRNN: RNNCell, num_layers: int = 1, dropout: float = 0, batch_first: bool = False
    ) -> None:
        super().__init__()
        self.fwd = stackedRNN(inputRNN, num_layers, dropout, batch_first)
        self.bckwrd = stackedRNN(inputRNN.new_like(), num_layers, dropout, batch_first)
        self.rnns = nn.ModuleList([self.fwd, self.bckwrd])

    def forward(
        self, input: Tensor, collect_hidden: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `stackedRNN.forward`; features of both directions beside each other."""
        output, hidden = self.fwd(input, collect_hidden)
        back_output, back_hidden = self.bckwrd(input, collect_hidden, reverse=True)
        pairs = zip(hidden, back_hidden, strict=True)
        return torch.cat([output, back_output], -1), tuple(torch.cat(pair, -1) for pair in pairs)
