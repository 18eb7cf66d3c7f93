"""What the recurrent networks compute in one step; knows no sequence.

torch's cells serve but where the output has another size than the state, which they refuse.

Source of the multiplicative LSTM: Krause et al., arXiv:1609.07959.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from .RNNBackend import RNNCell


def LSTMCell(
    input: Tensor,
    hidden: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the next output and cell state.

    Args:
        input: shape (batch, in).
        hidden: the output (batch, out) and the cell state (batch, hidden).
        w_ih, w_hh: shapes (4 hidden, in) and (4 hidden, out), in the order of torch.nn.LSTM.
        b_ih, b_hh: shape (4 hidden,).
    """
    output, cell = hidden
    if output.shape == cell.shape:
        return torch.lstm_cell(input, (output, cell), w_ih, w_hh, b_ih, b_hh)
    gates = functional.linear(input, w_ih, b_ih) + functional.linear(output, w_hh, b_hh)
    taken, kept, new, shown = gates.chunk(4, 1)
    cell = kept.sigmoid() * cell + taken.sigmoid() * new.tanh()
    return shown.sigmoid() * cell.tanh(), cell


def mLSTMCell(
    input: Tensor,
    hidden: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    w_mih: Tensor,
    w_mhh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the next output and cell state: `LSTMCell`'s, of an output that the input scales.

    Args:
        input, hidden, w_ih, w_hh, b_ih, b_hh: as `LSTMCell`.
        w_mih, w_mhh: shapes (out, in) and (out, out).
    """
    scaled = functional.linear(input, w_mih) * functional.linear(hidden[0], w_mhh)
    return LSTMCell(input, (scaled, hidden[1]), w_ih, w_hh, b_ih, b_hh)


def GRUCell(
    input: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Return the next state, shape (batch, hidden); weights as torch.nn.GRU's."""
    return torch.gru_cell(input, hidden, w_ih, w_hh, b_ih, b_hh)


def RNNReLUCell(
    input: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Return ``relu(w_ih @ input + b_ih + w_hh @ hidden + b_hh)`` for each row of a batch."""
    gates = functional.linear(input, w_ih, b_ih) + functional.linear(hidden, w_hh, b_hh)
    return gates.relu()


def RNNTanhCell(
    input: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Return ``tanh(w_ih @ input + b_ih + w_hh @ hidden + b_hh)`` for each row of a batch."""
    gates = functional.linear(input, w_ih, b_ih) + functional.linear(hidden, w_hh, b_hh)
    return gates.tanh()


class mLSTMRNNCell(RNNCell):
    """The parameters and the states of a multiplicative LSTM; arguments as `RNNCell`'s."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__(4, input_size, hidden_size, mLSTMCell, 2, bias, output_size)
        self.w_mih = nn.Parameter(torch.empty(self.output_size, self.input_size))
        self.w_mhh = nn.Parameter(torch.empty(self.output_size, self.output_size))
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> mLSTMRNNCell:
        """Return a new cell of the same sizes, but for the input's where one is given."""
        has_bias = self.b_ih is not None
        input_size = self.input_size if new_input_size is None else new_input_size
        return type(self)(input_size, self.hidden_size, has_bias, self.output_size)

    def _matrices(self) -> list[Tensor]:
        return [self.w_ih, self.w_hh, self.w_mih, self.w_mhh]
