"""apex.RNN: recurrent networks that keep their hidden states between calls."""

from . import RNNBackend, cells, models
from .models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "RNNBackend", "ReLU", "Tanh", "cells", "mLSTM", "models"]
