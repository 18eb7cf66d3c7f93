"""The recurrent networks by name.

All take (sequence, batch, input_size), or with batch_first (batch, sequence, input_size), and keep
their states between calls: see `RNNCell`. output_size is that of a projection of each output.
"""

from __future__ import annotations

from .cells import GRUCell, LSTMCell, RNNReLUCell, RNNTanhCell, mLSTMRNNCell
from .RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM", "toRNNBackend"]


def toRNNBackend(
    inputRNN: RNNCell,
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0,
    batch_first: bool = False,
) -> stackedRNN | bidirectionalRNN:
    """Return a network of num_layers layers of a cell, in one direction or in both."""
    network = bidirectionalRNN if bidirectional else stackedRNN
    return network(inputRNN, num_layers, dropout, batch_first)


def LSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Return a long short-term memory."""
    cell = RNNCell(4, input_size, hidden_size, LSTMCell, 2, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def GRU(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Return gated recurrent units.

    Raises:
        ValueError: output_size differs from hidden_size.
    """
    if output_size not in (None, hidden_size):
        raise ValueError(
            f"a GRU's output is its state, of hidden_size={hidden_size} features; got output_size="
            f"{output_size}. Call GRU() without it and put torch.nn.Linear after it."
        )
    cell = RNNCell(3, input_size, hidden_size, GRUCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def ReLU(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Return an Elman network with ReLU."""
    cell = RNNCell(1, input_size, hidden_size, RNNReLUCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def Tanh(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Return an Elman network with tanh."""
    cell = RNNCell(1, input_size, hidden_size, RNNTanhCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def mLSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> stackedRNN | bidirectionalRNN:
    """Return a multiplicative LSTM."""
    cell = mLSTMRNNCell(input_size, hidden_size, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)
